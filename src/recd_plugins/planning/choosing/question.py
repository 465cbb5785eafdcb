"""A model prepared and planned with some offers, and its predicted step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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

from recd_plugins.distributed.build import build_sharders
from recd_plugins.distributed.pipeline import will_overlap
from recd_plugins.errors import NoPlanError, PluginError, RecdError, SetupError
from recd_plugins.generators import generators_kept
from recd_plugins.interfaces import (
    ChoiceQuestion,
    Chooser,
    Offer,
    Offered,
    Setting,
    Table,
    Trial,
)
from recd_plugins.model_tables import all_tables_of, tables_of
from recd_plugins.planning.choosing.data import DataOfChoices
from recd_plugins.planning.choosing.entries import with_offers
from recd_plugins.planning.compute import NO_COMPUTE
from recd_plugins.planning.equal_gradients import as_run_sends
from recd_plugins.planning.machines import default_topology
from recd_plugins.planning.planner import build_planner
from recd_plugins.planning.prepare_entries import prepare_entries
from recd_plugins.planning.stage_times import predict_stages
from recd_plugins.planning.storage import activations_of_parts
from recd_plugins.planning.work import work_of_step
from recd_plugins.registry import Entry, RunConfig
from recd_plugins.values.data_profile import DataProfile
from recd_plugins.values.stages import StageTimes
from recd_plugins.values.work import Work

# Accesses are counted in so many rows to compare choices.
_SAMPLE = 4096
# Each is tried: that many are a mistake.
_MOST_OFFERS = 1000


@dataclass(frozen=True)
class RegistryQuestion(ChoiceQuestion):
    """What the chooser of a registry is asked for a model.

    Attributes:
        registry: with the chooser.
        chooser: its entry.
        model: not prepared; it stays as it is.
    """

    registry: RunConfig
    chooser: Entry[Chooser]
    model: nn.Module

    def offers(self, tables: Sequence[Table]) -> Sequence[Offer]:
        """See ``ChoiceQuestion.offers``."""
        setting = replace(self.setting, costs=self.costs)
        return [
            Offer(cls.name, options)
            for cls in self.registry.offering
            for options in cls.offers(tuple(tables), setting)
        ]

    def trial(self, offered: Offered, *, haste: bool = False) -> Trial:
        """See ``ChoiceQuestion.trial``."""
        profile, sample = self.profile(offered), _SAMPLE if haste else None
        data = DataOfChoices(self.setting.data, self.tables, profile, sample)
        registry = with_offers(self.registry, self.chooser, offered)
        try:
            with generators_kept():
                return self._planned(registry, replace(self.setting, data=data), haste)
        except PluginError as error:
            raise PluginError(f"{error}; recd --without PACKAGE leaves one out") from error
        except RecdError as error:
            return Trial(None, error=error)

    def profile(self, offered: Offered) -> DataProfile:
        """Of the data, with what these offers coalesce."""
        registry = with_offers(self.registry, self.chooser, offered)
        whole = self.setting.data.profile()
        plain = {
            table.name
            for table in self.tables
            if not any(e.plugin.coalesces and e.matches(table.name) for e in registry.sharding)
        }
        distinct = {name: each for name, each in whole.distinct.items() if name not in plain}
        return replace(whole, distinct=distinct)

    def _planned(self, registry: RunConfig, setting: Setting, haste: bool) -> Trial:
        with torch.device("meta"):
            model = meta_copy(self.model)
            prepared = prepare_entries(registry, model, setting, setting.device_type)
        profile = setting.data.profile()
        planner = build_planner(
            prepared,
            setting.topology
            or default_topology(
                setting.world_size, setting.ranks_per_node, torch.device(setting.device_type)
            ),
            profile=profile,
            # What the model keeps besides is the same whatever is chosen.
            activation_bytes=activations_of_parts(
                prepared.checked_parts, tables_of(prepared.model), profile, setting.batch_size
            ),
            replicate=registry.has_model,
        )
        sharders = build_sharders(prepared)
        try:
            plan = planner.plan_in_detail(prepared.model, sharders, haste=haste).sharding
        except NoPlanError:
            if not haste:
                raise
            plan = planner.plan_in_detail(prepared.model, sharders).sharding

        overlapped = will_overlap(prepared, plan, setting.device_type, setting.nodes)
        sent = as_run_sends(profile, setting.costs if setting.measured else None)
        planned = all_tables_of(prepared.model)

        def work(without: Collection[str]) -> Sequence[Work]:
            return work_of_step(
                [table for table in planned if table.name not in without],
                _without(plan, without),
                sent,
                NO_COMPUTE,  # it is the same whatever is chosen
                batch_size=setting.batch_size,
                world_size=setting.world_size,
                local_world_size=setting.ranks_per_node,
                parts=prepared.checked_parts,
                wire=prepared.registry.training.wire,
                overlapped=overlapped,
                gloo=setting.device_type == "cpu",
            )

        def step(works: Sequence[Work]) -> StageTimes:
            return predict_stages(works, self.costs, overlapped=overlapped)

        def without(names: Collection[str]) -> StageTimes:
            return step(work(names))

        works = work(())
        return Trial(step(works), tuple(works), without=without)


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
            f"plans are tried on copies of the model, and {type(model).__name__} cannot be copied "
            f"({error}): name shardings in place of the one that chooses"
        ) from error
