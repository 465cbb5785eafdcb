"""A model prepared and planned with some choices, and its predicted step."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from recd_plugins.access.profile import AccessProfile
from recd_plugins.distributed.sharders import build_sharders
from recd_plugins.errors import NoPlanError, PluginError, RecdError, RegistryError, SetupError
from recd_plugins.interfaces import Setting, Sharding, Table, TrainingData
from recd_plugins.model.deferred_tables import generators_kept
from recd_plugins.planning.auto.groups import Group, Offer
from recd_plugins.planning.compute import Compute, Operations
from recd_plugins.planning.machines import default_topology
from recd_plugins.planning.planner import build_planner
from recd_plugins.planning.prepare_entries import prepare_entries
from recd_plugins.planning.stage_times import predict
from recd_plugins.planning.stages import StageTimes
from recd_plugins.planning.work import work_of_step
from recd_plugins.registry import Entry, Registry
from recd_plugins.values.data_profile import DataProfile, DistinctIds
from recd_plugins.values.stage_costs import StageCosts
from recd_plugins.values.work import Work

# What the model computes besides is the same whatever is chosen.
_NO_COMPUTE = Compute(Operations(), Operations(), 0)

#: The offer of each group, None where its tables are left to the planner.
Choices = tuple[Offer | None, ...]


class DataOfChoices(TrainingData):
    """Data whose profile suits tables that ``auto`` has coalesced.

    Args:
        data: of the model, whatever is coalesced.
        tables: that are chosen for.
        profile: its own, with these tables coalesced.
    """

    def __init__(self, data: TrainingData, tables: Sequence[Table], profile: DataProfile) -> None:
        self._data = data
        self._tables = tables
        self._profile = profile

    def profile(self) -> DataProfile:
        """See ``TrainingData.profile``."""
        return self._profile

    def access(
        self, tables: Sequence[Table], rows: int | None, *, deduplicated: bool = True
    ) -> AccessProfile:
        """See ``TrainingData.access``; data is read once for all tables that are alike in kind."""
        found = self._data.access(self._alike(tables), rows, deduplicated=deduplicated)
        return AccessProfile({t.name: found.tables[t.name] for t in tables}, found.source)

    def distinct(self, tables: Sequence[Table]) -> Mapping[str, DistinctIds]:
        """See ``TrainingData.distinct``; likewise."""
        found = self._data.distinct(self._alike(tables))
        return {table.name: found[table.name] for table in tables if table.name in found}

    def _alike(self, tables: Sequence[Table]) -> tuple[Table, ...]:
        kinds = {table.pooled for table in tables}
        together = tuple(table for table in self._tables if table.pooled in kinds)
        return together if set(tables) <= set(together) else tuple(tables)

    def coalesced(self, profile: DataProfile) -> DataOfChoices:
        """The same data with another profile."""
        return DataOfChoices(self._data, self._tables, profile)


@dataclass(frozen=True)
class Trial:
    """What some choices come to.

    Attributes:
        seconds: of a step, without what the model computes; None where there is no plan.
        works: of each rank, likewise.
        error: why there is none.
    """

    seconds: StageTimes | None
    works: tuple[Work, ...] = ()
    error: RecdError | None = None

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
        setting: of the model.
        data: its data, with the distinct ids of all tables of the groups.
        costs: of what a step does.
    """

    def __init__(
        self,
        registry: Registry,
        auto: Entry[Sharding],
        groups: Sequence[Group],
        model: nn.Module,
        setting: Setting,
        data: DataOfChoices,
        costs: StageCosts,
    ) -> None:
        self._registry = registry
        self._auto = auto
        self._groups = groups
        self._model = model
        self._setting = setting
        self._data = data
        self._costs = costs
        self._made: dict[tuple[str, ...], Trial] = {}

    @property
    def count(self) -> int:
        """How many were made."""
        return len(self._made)

    def __call__(self, choices: Choices) -> Trial:
        """The trial of one offer a group.

        Raises:
            PluginError: a plugin failed.
        """
        key = tuple("" if offer is None else offer.key for offer in choices)
        if key not in self._made:
            self._made[key] = self._trial(choices, haste=True)
        return self._made[key]

    def registry(self, choices: Choices) -> Registry:
        """The registry with entries for the choices in place of ``auto``."""
        names: dict[str, list[str]] = {}
        offers: dict[str, Offer] = {}
        for group, offer in zip(self._groups, choices, strict=True):
            if offer is not None:
                offers[offer.key] = offer
                names.setdefault(offer.key, []).extend(table.name for table in group.tables)
        chosen = tuple(
            Entry(
                self._plugin(offer),
                tuple(glob.escape(name) for name in names[key]),
                f"{self._auto.field}.chosen[{number}]",
                self._auto.line,
            )
            for number, (key, offer) in enumerate(offers.items())
        )
        at = self._registry.sharding.index(self._auto)
        entries = self._registry.sharding
        sharding = (*entries[:at], *chosen, *entries[at + 1 :])
        return replace(self._registry, sharding=sharding, offering=())

    def _plugin(self, offer: Offer) -> Sharding:
        cls = next(cls for cls in self._registry.offering if cls.name == offer.use)
        return cls(cls.Options.model_validate(offer.options))

    def setting(self, registry: Registry) -> Setting:
        """That of a registry that ``registry`` made, whose data knows what is coalesced."""
        whole = self._data.profile()
        plain = {
            table.name
            for group in self._groups
            for table in group.tables
            if not any(e.plugin.coalesces and e.matches(table.name) for e in registry.sharding)
        }
        distinct = {name: each for name, each in whole.distinct.items() if name not in plain}
        return replace(self._setting, data=self._data.coalesced(replace(whole, distinct=distinct)))

    def as_planned(self, choices: Choices) -> Trial:
        """The trial with the plan that training makes; others are made in haste."""
        return self._trial(choices, haste=False)

    def _trial(self, choices: Choices, *, haste: bool) -> Trial:
        registry = self.registry(choices)
        try:
            with generators_kept():
                return self._planned(registry, self.setting(registry), haste)
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
        works = work_of_step(
            prepared.tables,
            planned.sharding,
            profile,
            _NO_COMPUTE,
            batch_size=setting.batch_size,
            world_size=setting.world_size,
            local_world_size=setting.ranks_per_node,
            parts=prepared.checked_parts,
        )
        return Trial(predict(works, self._costs), tuple(works))


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
