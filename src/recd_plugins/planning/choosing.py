"""``prepare``, and the search of chooser plugins such as ``use: auto`` for sharding entries."""

from __future__ import annotations

import glob
import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleShardingPlan, ShardingPlan

from recd_plugins.config import Entry, RunConfig, at_entry
from recd_plugins.config.run_config import NoDataset
from recd_plugins.data.arrow import sparse_column
from recd_plugins.data.plain import PlainConverter
from recd_plugins.data.prepared import placement_of, read_first_rows
from recd_plugins.data.row_pipeline import fit_converter
from recd_plugins.interfaces import (
    Candidate,
    Choice,
    Chooser,
    Evaluation,
    Offered,
    PlanContext,
    SearchContext,
    Sharding,
    Table,
    TrainingData,
)
from recd_plugins.interfaces.access import AccessProfile
from recd_plugins.interfaces.data_profile import DataProfile, DistinctIds
from recd_plugins.interfaces.model_tables import (
    EmbeddingModule,
    all_tables_of,
    embedding_modules,
    names_of_several,
    refuse_shared_tables,
    rows_by_feature,
    tables_of,
)
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.interfaces.step_cost import StageCosts, StageTimes, StepCost
from recd_plugins.model.sequence_pooling import put_poolings
from recd_plugins.planning.estimates import activations_of_parts
from recd_plugins.planning.plan_context import RegistryData, plan_context, profile_of_modules
from recd_plugins.planning.planner import RegistryPlanner, document, of_rank_0
from recd_plugins.planning.prepared import Prepared, apply_optimizers, prepare_entries
from recd_plugins.planning.step_cost import (
    NO_COMPUTE,
    Compute,
    collective_seconds,
    estimate_step_cost,
    predict_stages,
    rows_pooled,
)
from recd_plugins.planning.topologies import default_topology
from recd_plugins.runtime.activity import log_if_slow
from recd_plugins.runtime.errors import NoPlanError, PluginError, Problem, RecdError, RegistryError
from recd_plugins.runtime.generators import generators_kept
from recd_plugins.runtime.imports import without_collections
from recd_plugins.runtime.rank_agreement import check_agreement
from recd_plugins.runtime.text import shortened
from recd_plugins.sharding.build import build_sharders

logger = logging.getLogger(__name__)

# Rows read to compare candidates.
_SAMPLE = 4096
# Assumed seconds to deduplicate one id: hash table on a core, sort on a GPU.
_UNIQUE_SECONDS = {"cpu": 15e-9, "cuda": 1e-9}
# Seconds after which a message reports a long search.
_LONG_CHOICE = 15.0


def prepare(
    registry: RunConfig,
    model: nn.Module,
    context: PlanContext | None = None,
    *,
    topology: str | Path | None = None,
    device: torch.device | None = None,
) -> Prepared:
    """Apply the poolings, sharding plugins and other entries of a run config to ``model``.

    Args:
        registry: a loaded run config.
        model: unsharded; may be on the meta device. Changed in place. EmbeddingBagCollections
            receive ``batch.sparse_features``; EmbeddingCollections receive
            ``batch.sequence_features``, which SequencePooling pools.
        context: plan context; default: the ranks of this process group, or those that ``recd run``
            would start.
        topology: replaces ``training.topology``.
        device: device of the tables in training; default: a GPU if the model is on one or the ranks
            communicate by NCCL, else the CPU.

    Returns:
        The prepared model with its planner, sharders, data loader and train pipeline.

    Raises:
        RegistryError: a pattern matches no table or feature, or two entries select the same one.
        RecdError: a sequence feature has no pooling.
        ExactnessError: a combination of plugins would train incorrectly.
        SetupError: modules share a table, or a chooser such as ``use: auto`` finds no plan that
            fits.
    """
    if topology is not None:
        registry = registry.with_training({"topology": str(topology)})
    refuse_shared_tables(model)
    modules = list(embedding_modules(model))
    if context is not None:
        device_type: str | None = context.device_type
    else:
        # The trainer may still train on a GPU if there is one and no device is given.
        device_type = None if torch.cuda.is_available() else "cpu"
        device_type = device.type if device else device_type
        context = plan_context(registry, modules, device=device or _device_of(registry, model))
    registry, context, chosen = choose(registry, model, modules, context)
    prepared = prepare_entries(registry, model, modules, context, device_type)
    claims = registry.claim("sharding", [table.name for table in prepared.tables])
    for entry in registry.sharding:
        names = [table.name for table in prepared.tables if claims.get(table.name) is entry]
        logger.info("%r shards %s", entry.plugin.name, ", ".join(map(repr, names)))
    return replace(prepared, chosen=chosen)


def _device_of(registry: RunConfig, model: nn.Module) -> torch.device:
    """Guess on which device the tables will be trained."""
    if registry.training.device == "cpu":
        return torch.device("cpu")
    there = any(parameter.is_cuda for parameter in model.parameters())
    initialized = torch.cuda.is_available() and dist.is_initialized()
    by_nccl = initialized and "nccl" in str(dist.get_backend_config())
    return torch.device("cuda" if there or by_nccl else "cpu")


def choose(
    registry: RunConfig, model: nn.Module, modules: Sequence[EmbeddingModule], context: PlanContext
) -> tuple[RunConfig, PlanContext, Choice | None]:
    """Replace a chooser entry, such as ``use: auto``, by the sharding entries that it chooses.

    Rank 0 runs the chooser, and all ranks must call this function. ``model`` stays unchanged.

    Returns:
        The run config with the chosen entries, its plan context, and a report of the choice (None
        without a chooser).

    Raises:
        RegistryError: a pattern matches no table, two entries select the same table, the chooser
            has no tables, or two of its tables have the same name.
        NoPlanError: no candidate fits into memory.
        SetupError: ranks have different run configs, models or data.
    """
    chooser = chooser_of(registry)
    if chooser is None:
        return registry, context, None
    ours = [table for module in modules if module.ours for table in module.tables]
    claims = registry.claim("sharding", [table.name for table in ours])
    tables = tuple(table for table in ours if claims.get(table.name) is chooser)
    others = tuple(table.name for table in ours if claims.get(table.name) is not chooser)
    problem = ""
    if others and not tables:
        problem = "the other entries select every table, so no table is left. Remove this entry."
    elif twice := names_of_several(tables):
        problem = (
            f"several modules have tables with the same name: {shortened(twice)}. Rename these "
            "tables, or select them in another entry."
        )
    if problem:
        raise RegistryError([Problem(str(registry.path), chooser.line, chooser.field, problem)])
    find = partial(_find, registry, chooser, model, modules, tables, others, context)
    # Candidates have models of their own, outside of the mode of a model on the meta device.
    with without_collections(), _disable_current_modes():
        if dist.is_initialized() and dist.get_world_size() == context.world_size > 1:
            seen = {
                "the registry file": document(registry),
                "the model's tables": {table.name: asdict(table) for table in ours},
                "the first rows of the data": _digest(registry),
            }
            check_agreement(f"choosing by {chooser.plugin.name}", seen)
            choice, profile = of_rank_0(find)
        else:
            choice, profile = find()
    data = DataOfChoices(context.data, tables, profile)
    return with_offers(registry, chooser, choice.offered), replace(context, data=data), choice


def chooser_of(registry: RunConfig) -> Entry[Chooser] | None:
    """Return the entry of the chooser plugin, such as ``use: auto``; None if there is none."""
    found = (entry for entry in registry.sharding if isinstance(entry.plugin, Chooser))
    return cast("Entry[Chooser] | None", next(found, None))


def with_offers(registry: RunConfig, chooser: Entry[Sharding], offered: Offered) -> RunConfig:
    """Return a copy of the run config with the chooser's entry replaced by ``offered`` entries."""
    plugins: Mapping[str, type[Sharding]] = {cls.name: cls for cls in registry.offering}

    def entry(number: int, offer: Candidate, names: Sequence[str]) -> Entry[Sharding]:
        field = f"{chooser.field}, choice {number} of {chooser.plugin.name}"
        plugin = plugins[offer.use]
        made = plugin(plugin.Options.model_validate(offer.options))
        made.placed((str(registry.path), chooser.line, field))
        return Entry(made, tuple(glob.escape(name) for name in names), field, chooser.line)

    chosen = tuple(entry(number, *each) for number, each in enumerate(offered, start=1))
    at = registry.sharding.index(chooser)
    entries = (*registry.sharding[:at], *chosen, *registry.sharding[at + 1 :])
    return replace(registry, sharding=entries, offering=())


class DataOfChoices(TrainingData):
    """Training data whose ``profile`` also covers ``tables``, which a chooser may coalesce.

    A chooser, such as ``use: auto``, searches sharding plugins for its tables. Accesses are counted
    in at most ``sample`` rows; a small value overestimates hot rows.
    """

    def __init__(
        self,
        data: TrainingData,
        tables: Sequence[Table],
        profile: DataProfile,
        sample: int | None = None,
    ) -> None:
        self._data, self._tables = data, tables
        self._profile, self._sample = profile, sample

    def profile(self) -> DataProfile:
        return self._profile

    def access(
        self, tables: Sequence[Table], rows: int | None, *, deduplicated: bool = True
    ) -> AccessProfile:
        """Return how often each row of ``tables`` is read; reads the data once for all tables."""
        if self._sample is not None:
            rows = min(self._sample, rows or self._sample)
        found = self._data.access(self._alike(tables), rows, deduplicated=deduplicated)
        return AccessProfile({t.name: found.tables[t.name] for t in tables}, found.source)

    def distinct(self, tables: Sequence[Table]) -> Mapping[str, DistinctIds]:
        known = self._profile.distinct
        found = known if self._sample is not None else self._data.distinct(self._alike(tables))
        return {table.name: found[table.name] for table in tables if table.name in found}

    def _alike(self, tables: Sequence[Table]) -> tuple[Table, ...]:
        kinds = {table.pooled for table in tables}
        together = tuple(table for table in self._tables if table.pooled in kinds)
        return together if set(tables) <= set(together) else tuple(tables)


@dataclass(frozen=True)
class RegistrySearch(SearchContext):
    """Search context for a chooser such as ``use: auto``. The unprepared model stays unchanged."""

    registry: RunConfig
    chooser: Entry[Chooser]
    model: nn.Module

    def offers(self, tables: Sequence[Table]) -> Sequence[Candidate]:
        found: list[Candidate] = []
        context = replace(self.context, costs=self.costs)
        for cls in self.registry.offering:
            for options in cls.offers(tuple(tables), context):
                found.append(Candidate(cls.name, options))
        return found

    def evaluate(self, offered: Offered, *, fast: bool = False) -> Evaluation:
        profile, sample = self.profile(offered), _SAMPLE if fast else None
        data = DataOfChoices(self.context.data, self.tables, profile, sample)
        registry = with_offers(self.registry, self.chooser, offered)
        try:
            with generators_kept():
                return self._planned(registry, replace(self.context, data=data), fast)
        except PluginError:
            raise
        except RecdError as error:
            return Evaluation(None, error=error)

    def profile(self, offered: Offered) -> DataProfile:
        """Return the data profile; distinct ids are counted only for tables to coalesce."""
        registry = with_offers(self.registry, self.chooser, offered)
        whole = self.context.data.profile()
        plain = {
            table.name
            for table in self.tables
            if not any(e.plugin.coalesces and e.matches(table.name) for e in registry.sharding)
        }
        distinct = {name: each for name, each in whole.distinct.items() if name not in plain}
        return replace(whole, distinct=distinct)

    def _planned(self, registry: RunConfig, context: PlanContext, fast: bool) -> Evaluation:
        with torch.device("meta"):
            model = _meta_copy(self.model)
            modules = list(embedding_modules(model))
            prepared = prepare_entries(registry, model, modules, context, context.device_type)
        profile = context.data.profile()
        ranks = context.world_size, context.ranks_per_node, torch.device(context.device_type)
        planner = RegistryPlanner(
            prepared,
            context.topology or default_topology(*ranks),
            profile,
            # The model's own activations are the same for all candidates.
            activations_of_parts(
                prepared.plugin_strategies, tables_of(prepared.model), profile, context.batch_size
            ),
            replicate=registry.has_model,
        )
        sharders = build_sharders(prepared)
        try:
            plan = planner.plan_in_detail(prepared.model, sharders, fast=fast).sharding
        except NoPlanError:
            if not fast:
                raise
            plan = planner.plan_in_detail(prepared.model, sharders).sharding
        planned = all_tables_of(prepared.model)

        def step(without: Collection[str] = ()) -> StageTimes:
            works = step_cost_of(
                prepared,
                [table for table in planned if table.name not in without],
                _without(plan, without),
                profile,
                NO_COMPUTE,
                batch_size=context.batch_size,
                nodes=context.nodes,
                ranks_per_node=context.ranks_per_node,
                device_type=context.device_type,
            )
            return predict_stages(works, self.costs)

        return Evaluation(step(), without=step)


def _digest(registry: RunConfig) -> str:
    """Return a hash of the ids of the first batch; fits the converter to this batch first."""
    if isinstance(registry.dataset, NoDataset):
        return ""
    rows = read_first_rows(registry).rows
    fit_converter(registry, rows)
    digest = hashlib.sha256()
    for name in registry.dataset.schema().sparse:
        values, offsets = sparse_column(rows, name)
        digest.update(offsets.tobytes())
        digest.update(values[offsets[0] : offsets[-1]].tobytes())
    return digest.hexdigest()


def _find(
    registry: RunConfig,
    chooser: Entry[Chooser],
    model: nn.Module,
    modules: Sequence[EmbeddingModule],
    tables: Sequence[Table],
    others: tuple[str, ...],
    context: PlanContext,
) -> tuple[Choice, DataProfile]:
    plugin = chooser.plugin
    profile = _profile(registry, modules, tables, context.data)
    known = replace(context, data=DataOfChoices(context.data, tables, profile))
    costs = _costs(context)
    question = RegistrySearch(tables, others, known, costs, registry, chooser, model)
    said = f"{plugin.name} is still searching plans for {len(tables)} tables"
    try:
        with log_if_slow(_LONG_CHOICE, said), plugin_call(plugin, "choose"):
            choice = plugin.choose(question)
    except NoPlanError as error:
        raise NoPlanError(
            f"{registry.path}:{chooser.line} {chooser.field}: {plugin.name!r} found no plan that "
            f"fits into memory. TorchRec's planner for all tables: {error}"
        ) from error
    except RecdError:
        with at_entry(registry.path, chooser):
            raise
    return choice, question.profile(choice.offered)


def _profile(
    registry: RunConfig,
    modules: Sequence[EmbeddingModule],
    tables: Sequence[Table],
    data: TrainingData,
) -> DataProfile:
    """Return lengths and dedupe factors of all features, and distinct ids of ``tables``."""
    measured = profile_of_modules(registry, modules, tables)
    if isinstance(data, RegistryData):
        return measured
    known = data.profile()
    return replace(
        known,
        distinct={**measured.distinct, **known.distinct},
        read={**measured.read, **known.read},
    )


def _costs(context: PlanContext) -> StageCosts:
    """Return step costs, with assumed values for missing ones."""
    assert context.costs is not None, "plan_context sets costs"
    all_to_all, other = context.costs.all_to_all, context.costs.other
    if not all_to_all.collectives:
        assumed = {"collectives": collective_seconds(context.device_type)}
        all_to_all = all_to_all.model_copy(update=assumed)
    if not other.ids_made_unique:
        assumed = {"ids_made_unique": _UNIQUE_SECONDS[context.device_type]}
        other = other.model_copy(update=assumed)
    return context.costs.model_copy(update={"all_to_all": all_to_all, "other": other})


def _without(plan: ShardingPlan, tables: Collection[str]) -> ShardingPlan:
    modules: dict[str, ModuleShardingPlan] = {}
    for path, module in plan.plan.items():
        assert isinstance(module, EmbeddingModuleShardingPlan), "TorchRec's planner makes these"
        left = {name: sharding for name, sharding in module.items() if name not in tables}
        modules[path] = EmbeddingModuleShardingPlan(left)
    return ShardingPlan(modules)


def _meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device."""
    memo: dict[int, object] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        vars(empty).update(vars(tensor))  # for example optimizers that are set on parameters
        memo[id(tensor)] = empty
    return deepcopy(model, memo)


def step_cost_of(
    prepared: Prepared,
    tables: Sequence[Table],
    plan: ShardingPlan,
    profile: DataProfile,
    compute: Compute,
    *,
    batch_size: int,
    nodes: int,
    ranks_per_node: int,
    device_type: str,
) -> list[StepCost]:
    """Estimate a training step of a planned model; return one StepCost per rank."""
    training = prepared.registry.training
    return estimate_step_cost(
        tables,
        plan,
        profile,
        compute,
        batch_size=batch_size,
        world_size=nodes * ranks_per_node,
        local_world_size=ranks_per_node,
        parts=prepared.plugin_strategies,
        wire=training.wire,
        joined=device_type == "cpu" and training.overlaps(device_type, nodes),
        gloo=device_type == "cpu",
    )


def activation_bytes(
    prepared: Prepared, profile: DataProfile, kept: Compute, batch_size: int
) -> int:
    """Return the activation bytes per rank, without the outputs of sharded lookups."""
    tables = tables_of(prepared.model)
    pooled = rows_pooled(tables, profile, kept, batch_size)
    of_parts = activations_of_parts(prepared.plugin_strategies, tables, profile, batch_size)
    return round(kept.rest_saved_bytes * batch_size + kept.pooling_saved_bytes * pooled + of_parts)


def without_plugins(
    registry: RunConfig, model: nn.Module, device_type: str | None = None
) -> Prepared:
    """Prepare the baseline of a comparison: plain batches and float32 between ranks.

    It uses no deduplication, no overlap, and no plugins for sharding, caches or pipelines.
    """
    registry = registry.with_training({"wire": "fp32", "overlap": False})
    tables = tuple(tables_of(model))
    claims = registry.claim("sharding", [table.name for table in tables])
    modules = list(embedding_modules(model))
    placement = placement_of(modules, {name: entry.plugin for name, entry in claims.items()})
    put_poolings(registry, model)
    plain = replace(
        registry,
        converter=PlainConverter(PlainConverter.Options()),
        sharding=(),
        cache=(),
        further={**registry.further, "pipeline": ()},
    )
    apply_optimizers(plain, modules, tables, device_type, {})
    return Prepared(plain, model, placement, rows_by_feature(tables), tables)
