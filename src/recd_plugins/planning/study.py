"""Plans of a registry's model for a topology, with its plugins and without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ModuleSharder

from recd_plugins.config import RunConfig
from recd_plugins.data.plain import PlainConverter
from recd_plugins.data.prepared import placement_of, smallest_batch, wrapped_dataset
from recd_plugins.interfaces import Table, TrainingData
from recd_plugins.interfaces.data_profile import DataProfile
from recd_plugins.interfaces.model_tables import (
    all_tables_of,
    names_of_several,
    rows_by_feature,
    tables_of,
)
from recd_plugins.interfaces.step_cost import StageCosts, StageTimes
from recd_plugins.model.build import build_model
from recd_plugins.model.sequence_pooling import put_poolings
from recd_plugins.planning.compute import NO_COMPUTE, Compute, KeptActivations, measure_compute
from recd_plugins.planning.estimates import (
    RESERVED_SHARE,
    activations_of_parts,
    dense_bytes,
    memory_of_parts,
    row_memory,
    state_bytes,
)
from recd_plugins.planning.optimizer_entries import apply_optimizers
from recd_plugins.planning.planner import Planned, RegistryPlanner
from recd_plugins.planning.prepare import prepare
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.profile import as_run_sends
from recd_plugins.planning.report import PlannedTable, PlanReport, SideReport
from recd_plugins.planning.setting import RegistryData, setting_of
from recd_plugins.planning.step_cost import (
    check_some_time,
    estimate_step_cost,
    predict_stages,
    rows_pooled,
)
from recd_plugins.planning.topologies import TopologySpec, costs_source
from recd_plugins.runtime.errors import DataError, NoPlanError, RecdError, RegistryError, SetupError
from recd_plugins.runtime.text import shortened
from recd_plugins.sharding.pipeline import will_overlap
from recd_plugins.sharding.sharders import stock_sharders

#: What takes the memory of a rank, beside embeddings, optimizer and what table parts name.
COMPONENTS = ("inputs and outputs", "activations", "dense layers", "reserve")
#: The least step between two batch sizes, in rows.
GRANULE = 64
# The largest batch is found to one part in so many.
_PARTS = 128
# FBGEMM counts the rows of a batch in 32 bits.
_MOST_ROWS = 2**31


@dataclass(frozen=True)
class ShardableModel:
    """A model that can be planned for any topology and batch size.

    Table parts suit one topology and batch size: see ``with_plugins``.

    Attributes:
        prepared: its model is on the meta device, so that tables of any size take no memory.
        sharders: of its embedding modules.
        profile: of the features as this model is fed them.
    """

    prepared: Prepared
    sharders: list[ModuleSharder[nn.Module]]
    profile: DataProfile

    @property
    def tables(self) -> list[Table]:
        """The embedding tables of the model, those of modules that are left to TorchRec too."""
        return all_tables_of(self.prepared.model)

    def as_plain(self) -> ShardableModel:
        """Return the same without plugins, fed plain KJTs: the baseline of ``--compare``."""
        registry = self.prepared.registry
        with torch.device("meta"):
            model = build_model(registry, registry.dataset.schema())
            plain = without_plugins(registry, model)
        return ShardableModel(plain, stock_sharders(registry.training), self.profile.plain())

    def plan(self, topology: Topology, batch_size: int, activation_bytes: int = 0) -> Planned:
        """Return the plan that training makes, with room for activations.

        Raises:
            NoPlanError: no plan fits into memory.
            RecdError: plugins and tables do not go together.
        """
        planner = self._planner(topology, batch_size, activation_bytes)
        return planner.plan_in_detail(self.prepared.model, self.sharders)

    def fits(self, topology: Topology, batch_size: int, activation_bytes: int = 0) -> bool:
        """Return whether ``plan`` finds one that fits into memory.

        Raises:
            RecdError: plugins and tables do not go together.
        """
        planner = self._planner(topology, batch_size, activation_bytes)
        return planner.fits(self.prepared.model, self.sharders)

    def activation_bytes(self, compute: Compute, batch_size: int) -> int:
        """Return what a forward pass of a rank keeps beside its lookups in sharded tables."""
        return activation_bytes(self.prepared, self.profile, compute, batch_size)

    def _planner(
        self, topology: Topology, batch_size: int, activation_bytes: int
    ) -> RegistryPlanner:
        prepared = self.prepared.with_training({"batch_size": batch_size})
        return prepared.planner(
            topology, profile=self.profile, activation_bytes=activation_bytes, replicate=True
        )


def activation_bytes(
    prepared: Prepared, profile: DataProfile, kept: KeptActivations, batch_size: int
) -> int:
    """Return what a forward pass of a rank keeps beside its lookups in sharded tables."""
    tables = tables_of(prepared.model)
    pooled = rows_pooled(tables, profile, kept, batch_size)
    of_parts = activations_of_parts(prepared.checked_parts, tables, profile, batch_size)
    return round(kept.rest_saved_bytes * batch_size + kept.pooling_saved_bytes * pooled + of_parts)


def with_plugins(
    registry: RunConfig, topology: TopologySpec | None = None, data: TrainingData | None = None
) -> ShardableModel:
    """Return what ``recd run`` trains.

    Table parts are made for ``topology`` and the registry's batch size.

    Args:
        registry: not prepared.
        topology: the ranks; those that ``recd run`` would start here without it.
        data: of the registry, if it was looked at already.

    Raises:
        RecdError: the registry has no model, several of its tables have one name, or the data is
            missing or wrong.
    """
    with torch.device("meta"):
        model = build_model(registry, registry.dataset.schema())
        if twice := names_of_several(all_tables_of(model)):
            raise SetupError(
                f"{registry.path}: several modules have tables of one name, {shortened(twice)}, "
                "and plans are told by name: give each a name of its own"
            )
        data = data or RegistryData(registry, model)
        prepared = prepare(registry, model, setting_of(registry, model, topology, data=data))
    assert prepared.setting is not None, "it was prepared for one"
    return ShardableModel(prepared, prepared.sharders(), prepared.setting.data.profile())


def data_of_model(registry: RunConfig) -> RegistryData:
    """Return the training split of a registry, as the model of its ``model:`` section knows it."""
    with torch.device("meta"):
        return RegistryData(registry, build_model(registry, registry.dataset.schema()))


def without_plugins(
    registry: RunConfig, model: nn.Module, device_type: str | None = None
) -> Prepared:
    """Prepare the baseline: the same data, model and optimizers, float32 between ranks, no overlap,
    and no deduplication, sharding, cache or pipeline plugin."""
    registry = registry.with_training({"wire": "fp32", "overlap": False})
    tables = tuple(tables_of(model))
    claims = registry.claim("sharding", [table.name for table in tables])
    placement = placement_of(model, {name: entry.plugin for name, entry in claims.items()})
    put_poolings(registry, model)
    plain = replace(
        registry,
        converter=PlainConverter(PlainConverter.Options()),
        sharding=(),
        cache=(),
        further={**registry.further, "pipeline": ()},
    )
    apply_optimizers(plain, model, list(tables), device_type, {})
    return Prepared(plain, model, placement, rows_by_feature(tables), tables)


def largest_batch(fits: Callable[[int], bool], *, start: int, together: int = 1) -> tuple[int, int]:
    """Return the largest batch that fits, and the step in which it was looked for.

    Args:
        fits: whether there is a plan at a batch size.
        start: a batch size to begin with.
        together: rows of which batches are multiples.

    Raises:
        NoPlanError: not even ``GRANULE`` rows fit, or as many times ``together``.
    """
    least = GRANULE * together
    low, high = 0, max(least, start - start % least)
    while high < _MOST_ROWS and fits(high):
        low, high = high, 2 * high

    def step() -> int:
        """The least step, doubled as long as it is a small part of the batch."""
        found = least
        while 2 * found * _PARTS <= low:
            found *= 2
        return found

    # A step divides low and high: they are the least times a number, or one doubled.
    while (high - low) > step():
        middle = low + max(step(), (high - low) // 2 // step() * step())
        if middle < _MOST_ROWS and fits(middle):
            low = middle
        else:
            high = middle
    if not low:
        raise NoPlanError(
            f"no plan fits, not even for batches of {least} rows a rank; use more ranks, or "
            "smaller tables"
        )
    return low, high - low


def study(
    registry: RunConfig,
    name: str,
    spec: TopologySpec,
    batch_size: int | None,
    say: Callable[[str], None],
    compute: Compute | None = None,
) -> PlanReport:
    """Plan both sides, at ``batch_size`` rows a rank or each at the largest batch that fits.

    Args:
        registry: not prepared.
        name: of the topology.
        spec: its nodes and ranks.
        batch_size: None looks for the largest.
        say: told what is being done.
        compute: of the model; counted here without it.

    Raises:
        NoPlanError: the plan with the plugins does not fit.
        RecdError: registry, data and model do not go together.
    """
    wrapped_dataset(registry).prepare()
    say("counting what the model computes")
    compute = compute or measure_compute(registry)
    start = registry.training.batch_size
    if batch_size is not None and _too_few_rows(registry, 1, start):
        # The data is measured in batches of the file; none is needed that is not planned for.
        registry = registry.with_training({"batch_size": batch_size})
    data = data_of_model(registry)
    together = smallest_batch(wrapped_dataset(registry))
    find = partial(largest_batch, start=start, together=together)

    @cache
    def plugins(rows: int) -> ShardableModel:
        # Table parts are made for a batch size.
        try:
            return with_plugins(registry.with_training({"batch_size": rows}), spec, data)
        except DataError as error:
            raise DataError(f"a plan looks at a batch of the first rows, and {error}") from error

    side = partial(_side, spec=spec, compute=compute, batch_size=batch_size, find=find, say=say)
    mine = side("with the plugins", plugins)
    candidate = plugins(mine.batch_size)
    plain, theirs, problem = candidate.as_plain(), None, ""
    try:
        # If the data has no such batch for one, it has none for the other.
        theirs = side("plain", lambda _: plain, other=mine)
    except SetupError as error:  # as if it fits nowhere
        problem = str(error)
    chosen = candidate.prepared.chosen
    return PlanReport(
        name,
        spec,
        costs_source(spec),
        data.profile(),
        mine,
        theirs,
        problem,
        registry.training.wire,
        chosen and chosen.with_compute(mine.seconds - mine.seconds_of_tables),
        _too_few_rows(registry, spec.world_size, mine.batch_size),
    )


def _side(
    what: str,
    candidates: Callable[[int], ShardableModel],
    *,
    spec: TopologySpec,
    compute: Compute,
    batch_size: int | None,
    find: Callable[[Callable[[int], bool]], tuple[int, int]],
    say: Callable[[str], None],
    other: SideReport | None = None,
) -> SideReport:
    largest = step = None
    one_fits, data_ends = False, dict[int, str]()  # why the data has no batch of a size
    refused: RecdError | None = None  # why there is no plan for the batch that was tried last
    topology = spec.to_torchrec()

    def fits(rows: int) -> bool:
        nonlocal one_fits, refused
        refused = None
        say(f"looking for the largest batch {what}: {rows:,} rows a rank")
        if other is not None and other.data_ends and rows > other.batch_size:
            data_ends[rows] = other.data_ends
            return False
        try:
            candidate = candidates(rows)
        except DataError as error:
            if not one_fits:
                raise
            data_ends[rows] = f"at {rows:,} rows a rank: {error}"
            return False
        except (NoPlanError, RegistryError) as error:
            # Of an entry, which refuses a batch that is too large.
            if not isinstance(error, NoPlanError) and not isinstance(error.__cause__, SetupError):
                raise
            refused = error
            return False
        found = candidate.fits(topology, rows, candidate.activation_bytes(compute, rows))
        one_fits = one_fits or found
        return found

    if batch_size is None:
        try:
            largest, step = find(fits)
        except NoPlanError as error:
            raise (refused or error) from None
        batch_size = largest
    say(f"planning {what}: batches of {batch_size:,} on {spec.world_size:,} ranks")
    candidate = candidates(batch_size)
    kept = candidate.activation_bytes(compute, batch_size)
    return report_side(
        candidate,
        candidate.plan(topology, batch_size, kept),
        spec,
        batch_size=batch_size,
        largest_batch_size=largest,
        batch_step=step,
        data_ends=data_ends.get(batch_size + (step or 0), ""),
        compute=compute,
        costs=spec.costs or spec.least_costs,
    )


def _too_few_rows(registry: RunConfig, ranks: int, batch_size: int) -> str:
    """Why the data has no batch for each rank; empty if it has.

    No reason to refuse a plan: it looks at the first rows alone, and they may be a sample.
    """
    try:
        wrapped_dataset(registry).reader(
            rank=0, world_size=ranks, batch_size=batch_size, split="train"
        )
    except DataError as error:
        return str(error)
    return ""


def report_side(
    candidate: ShardableModel,
    planned: Planned,
    spec: TopologySpec,
    *,
    batch_size: int,
    largest_batch_size: int | None = None,
    batch_step: int | None = None,
    data_ends: str = "",
    compute: Compute,
    costs: StageCosts,
) -> SideReport:
    """Estimate memory and time of a plan.

    Raises:
        SetupError: by ``costs`` a step takes no time.
    """
    prepared = candidate.prepared
    overlapped = will_overlap(prepared, planned.sharding, spec.device, spec.nodes)

    def step(compute: Compute) -> StageTimes:
        works = estimate_step_cost(
            candidate.tables,
            planned.sharding,
            as_run_sends(candidate.profile, spec.costs),
            compute,
            batch_size=batch_size,
            world_size=spec.world_size,
            local_world_size=spec.ranks_per_node,
            parts=prepared.checked_parts,
            wire=prepared.registry.training.wire,
            overlapped=overlapped,
            gloo=spec.device == "cpu",
        )
        return predict_stages(works, costs, overlapped=overlapped)

    on_hosts = np.zeros(spec.world_size, np.int64)
    for option in planned.options if spec.device == "cuda" else ():
        for shard in option.shards:
            on_hosts[shard.rank] += shard.storage.ddr
    return SideReport(
        batch_size,
        largest_batch_size,
        batch_step,
        data_ends,
        _tables(candidate, planned, batch_size),
        _memory(candidate, planned, spec, candidate.activation_bytes(compute, batch_size)),
        on_hosts,
        check_some_time(step(compute)),
        step(NO_COMPUTE),
    )


def _tables(
    candidate: ShardableModel, planned: Planned, batch_size: int
) -> tuple[PlannedTable, ...]:
    options = {option.name: option for option in planned.options}
    groups = {name: group for group in planned.groups for name in group.tables}
    parts, profile = candidate.prepared.checked_parts, candidate.profile
    uncoalesced = replace(profile, distinct={})
    found = []
    for table in candidate.tables:
        if (option := options.get(table.name)) is None:
            continue  # nobody shards it: each rank has it as it has dense layers
        per_rank = Counter[int]()
        for shard in option.shards:
            per_rank[shard.rank] += shard.storage.hbm + shard.storage.ddr
        all_ids = sum(profile.of(feature).length for feature in table.features) * batch_size
        ids = profile.ids(table, batch_size)
        # Of a pooled table one vector a row, else one an id.
        sent = [
            (known.rows if table.pooled else known.ids)(table, batch_size)
            for known in (profile, uncoalesced)
        ]
        group = groups.get(table.name)
        figures = {name: each for part in parts for name, each in part.figures(table.name).items()}
        words = [line for part in parts for line in part.words(table.name)]
        found.append(
            PlannedTable(
                table.name,
                table.features,
                table.num_embeddings,
                table.embedding_dim,
                table.pooled,
                option.sharding_type,
                option.compute_kernel,
                tuple(sorted(per_rank)),
                max(per_rank.values()),
                all_ids / ids if ids else 1.0,
                _cached_rows(option),
                sent[0],
                sent[1] if table.name in profile.distinct else None,
                figures if group is None else {**group.as_json(), **figures},
                tuple(words if group is None else [group.words, *words]),
            )
        )
    return tuple(found)


def _cached_rows(option: ShardingOption) -> int | None:
    cached = option.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    if not cached or option.cache_load_factor is None:
        return None
    return round(option.cache_load_factor * option.tensor.shape[0])


def _memory(
    candidate: ShardableModel, planned: Planned, spec: TopologySpec, activation_bytes: int
) -> dict[str, NDArray[np.int64]]:
    training = candidate.prepared.registry.training
    on_gpu = spec.device == "cuda"
    of_entries = candidate.prepared.checked_parts
    beside = memory_of_parts(of_entries, spec.ranks_per_node, training.optimizer)
    names = ("embeddings", "optimizer", *beside, *COMPONENTS)
    parts = {name: np.zeros(spec.world_size, np.int64) for name in names}
    of_shards = planned.static()
    for option in planned.options:
        for shard, static in zip(option.shards, of_shards[option.name], strict=True):
            held = static.hbm if on_gpu else static.ddr
            whole = shard.storage.hbm if on_gpu else shard.storage.ddr
            known = row_memory(of_entries, option, shard, training.optimizer, spec.device)
            if known is not None:
                state = known.optimizer
            else:
                on_host = on_gpu and "uvm" in option.compute_kernel
                state = 0 if on_host else state_bytes(option, shard, training)
            parts["embeddings"][shard.rank] += held - state
            parts["optimizer"][shard.rank] += state
            parts["inputs and outputs"][shard.rank] += whole - held
    for name, held in beside.items():
        parts[name] += held
    parts["activations"] += activation_bytes
    parts["dense layers"] += dense_bytes(candidate.prepared.model, candidate.sharders, training)
    parts["reserve"] += round(RESERVED_SHARE * spec.memory_bytes)
    return parts
