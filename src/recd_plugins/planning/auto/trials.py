"""A model prepared and planned with some choices, and its predicted step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ShardingPlan,
)

from recd_plugins.distributed.sharders import build_sharders
from recd_plugins.errors import NoPlanError, PluginError, RecdError, RegistryError, SetupError
from recd_plugins.interfaces import Setting, Sharding
from recd_plugins.model.deferred_tables import generators_kept
from recd_plugins.planning.auto.data import DataOfChoices
from recd_plugins.planning.auto.entries import with_offers
from recd_plugins.planning.auto.groups import Group, Offer
from recd_plugins.planning.compute import Compute, Operations
from recd_plugins.planning.machines import default_topology
from recd_plugins.planning.planner import build_planner
from recd_plugins.planning.prepare_entries import prepare_entries
from recd_plugins.planning.stage_times import predict_stages
from recd_plugins.planning.stages import StageTimes
from recd_plugins.planning.work import work_of_step
from recd_plugins.registry import Entry, Registry
from recd_plugins.values.data_profile import DataProfile
from recd_plugins.values.stage_costs import StageCosts
from recd_plugins.values.work import Work

# What the model computes besides is the same whatever is chosen.
_NO_COMPUTE = Compute(Operations(), Operations(), 0)

#: The offer of each group, None where its tables are left to the planner.
Choices = tuple[Offer | None, ...]


# Accesses are counted in so many rows to compare choices.
_SAMPLE = 4096


@dataclass(frozen=True)
class Trial:
    """What some choices come to.

    Attributes:
        seconds: of a step, without what the model computes; None where there is no plan.
        works: of each rank, likewise.
        error: why there is none.
        work: that of the tables other than some, by rank.
    """

    seconds: StageTimes | None
    works: tuple[Work, ...] = ()
    error: RecdError | None = None
    work: Callable[[Collection[str]], Sequence[Work]] = lambda _: ()

    @property
    def why(self) -> str:
        """The error in words, without the place in the file, which says ``auto``."""
        if isinstance(self.error, RegistryError):
            return "; ".join(problem.message for problem in self.error.problems)
        return str(self.error)

    @property
    def total(self) -> float:
        """Seconds of the step; infinite where there is no plan."""
        return float("inf") if self.seconds is None else self.seconds.total


class Trials:
    """Trials of choices, each made once.

    Args:
        registry: with the entry ``auto``.
        auto: that entry.
        groups: of its tables.
        model: not prepared; it stays as it is.
        setting: of the model; the profile of its data has the distinct ids of all these tables.
        costs: of what a step does.
    """

    def __init__(
        self,
        registry: Registry,
        auto: Entry[Sharding],
        groups: Sequence[Group],
        model: nn.Module,
        setting: Setting,
        costs: StageCosts,
    ) -> None:
        self._registry = registry
        self._auto = auto
        self._groups = groups
        self._model = model
        self._setting = setting
        self._costs = costs
        self._made: dict[Choices, Trial] = {}
        self._settled: set[Choices] = set()

    @property
    def made(self) -> Mapping[Choices, Trial]:
        """Those that were made."""
        return self._made

    def __call__(self, choices: Choices) -> Trial:
        """The trial of one offer a group, made in haste: of a sample of the data, by few proposals.

        Raises:
            PluginError: a plugin failed.
        """
        if choices not in self._made:
            self._made[choices] = self._trial(choices, haste=True)
        return self._made[choices]

    def settle(self, choices: Choices) -> bool:
        """Whether a trial is of the plan that training makes; from now on it is."""
        if settled := choices in self._settled:
            return settled
        self._settled.add(choices)
        self._made[choices] = self._trial(choices, haste=False)
        return settled

    def seconds_without(self, choices: Choices, numbers: Collection[int]) -> float:
        """Seconds of the step without the tables of some groups, of choices that have a plan."""
        left_out = {table.name for number in numbers for table in self._groups[number].tables}
        return predict_stages(self(choices).work(left_out), self._costs).total

    def offers(self, choices: Choices) -> list[tuple[Offer, list[str]]]:
        """Each offer that was chosen, with its tables."""
        names: dict[str, tuple[Offer, list[str]]] = {}
        for group, offer in zip(self._groups, choices, strict=True):
            if offer is not None:
                names.setdefault(offer.key, (offer, []))[1].extend(t.name for t in group.tables)
        return list(names.values())

    def profile(self, choices: Choices) -> DataProfile:
        """Of the data, with what these choices coalesce."""
        registry = with_offers(self._registry, self._auto, self.offers(choices))
        whole = self._setting.data.profile()
        plain = {
            table.name
            for group in self._groups
            for table in group.tables
            if not any(e.plugin.coalesces and e.matches(table.name) for e in registry.sharding)
        }
        distinct = {name: each for name, each in whole.distinct.items() if name not in plain}
        return replace(whole, distinct=distinct)

    def _trial(self, choices: Choices, *, haste: bool) -> Trial:
        tables = [table for group in self._groups for table in group.tables]
        data = DataOfChoices(
            self._setting.data, tables, self.profile(choices), _SAMPLE if haste else None
        )
        registry = with_offers(self._registry, self._auto, self.offers(choices))
        try:
            with generators_kept():
                return self._planned(registry, replace(self._setting, data=data), haste)
        except PluginError:
            raise
        except RecdError as error:
            return Trial(None, error=error)

    def _planned(self, registry: Registry, setting: Setting, haste: bool) -> Trial:
        with torch.device("meta"):
            model = meta_copy(self._model)
            prepared = prepare_entries(registry, model, setting, setting.device_type)
        profile = setting.data.profile()
        planner = build_planner(
            prepared,
            setting.topology
            or default_topology(
                setting.world_size, setting.ranks_per_node, torch.device(setting.device_type)
            ),
            profile=profile,
            replicate=registry.has_model,
        )
        sharders = build_sharders(prepared)
        try:
            planned = planner.plan_in_detail(prepared.model, sharders, haste=haste)
        except NoPlanError:
            if not haste:
                raise
            planned = planner.plan_in_detail(prepared.model, sharders)

        def work(without: Collection[str]) -> Sequence[Work]:
            return work_of_step(
                [table for table in prepared.tables if table.name not in without],
                _without(planned.sharding, without),
                profile,
                _NO_COMPUTE,
                batch_size=setting.batch_size,
                world_size=setting.world_size,
                local_world_size=setting.ranks_per_node,
                parts=prepared.checked_parts,
                wire=prepared.registry.training.wire,
            )

        works = work(())
        return Trial(predict_stages(works, self._costs), tuple(works), work=work)


def _without(plan: ShardingPlan, tables: Collection[str]) -> ShardingPlan:
    modules: dict[str, ModuleShardingPlan] = {}
    for path, module in plan.plan.items():
        assert isinstance(module, EmbeddingModuleShardingPlan), "TorchRec's planner makes these"
        left = {name: sharding for name, sharding in module.items() if name not in tables}
        modules[path] = EmbeddingModuleShardingPlan(left)
    return ShardingPlan(modules)


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers have no values.

    Raises:
        SetupError: the model cannot be copied.
    """
    memo: dict[int, object] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        vars(empty).update(vars(tensor))  # as of optimizers that parameters bring
        memo[id(tensor)] = empty
    try:
        return deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise SetupError(
            f"auto tries plans on copies of the model, and {type(model).__name__} cannot be copied "
            f"({error}): name shardings in place of auto"
        ) from error
