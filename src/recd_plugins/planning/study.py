"""Plans a run config's model with and without its plugins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ModuleSharder

from recd_plugins.config import RunConfig
from recd_plugins.data.prepared import smallest_batch, wrapped_dataset
from recd_plugins.interfaces import Table, TrainingData
from recd_plugins.interfaces.data_profile import DataProfile
from recd_plugins.interfaces.model_tables import all_tables_of, embedding_modules, names_of_several
from recd_plugins.interfaces.step_cost import StageCosts
from recd_plugins.model.build import build_model
from recd_plugins.planning.choosing import activation_bytes, prepare, step_cost_of, without_plugins
from recd_plugins.planning.compute import measure_compute
from recd_plugins.planning.estimates import (
    RESERVED_SHARE,
    dense_bytes,
    memory_of_parts,
    row_memory,
    state_bytes,
)
from recd_plugins.planning.plan_context import RegistryData, plan_context
from recd_plugins.planning.planner import Planned, RegistryPlanner
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.report import PlannedTable, PlanReport, VariantReport
from recd_plugins.planning.step_cost import Compute, predict_stages
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.runtime.errors import DataError, NoPlanError, RecdError, RegistryError, SetupError
from recd_plugins.runtime.text import shortened
from recd_plugins.sharding.sharders import stock_sharders

#: Memory of a rank in addition to embeddings, optimizer and table strategies.
COMPONENTS = ("inputs and outputs", "activations", "dense layers", "reserve")
#: Smallest step of the batch size search, in rows.
GRANULE = 64
# Relative precision of the largest batch size.
_PARTS = 128
# FBGEMM counts the rows of a batch in 32 bits.
_MOST_ROWS = 2**31


@dataclass(frozen=True)
class ShardableModel:
    """A prepared model on the meta device, for one topology and batch size.

    ``profile`` has the lengths and dedupe factors of the features as the model receives them.
    """

    prepared: Prepared
    sharders: list[ModuleSharder[nn.Module]]
    profile: DataProfile

    @property
    def tables(self) -> list[Table]:
        """Return all embedding tables, including those that only TorchRec's sharders support."""
        return all_tables_of(self.prepared.model)

    def as_plain(self) -> ShardableModel:
        """Return the baseline: the model without plugins, with plain KeyedJaggedTensors."""
        registry = self.prepared.registry
        with torch.device("meta"):
            model = build_model(registry, registry.dataset.schema())
            plain = without_plugins(registry, model)
        return ShardableModel(plain, stock_sharders(registry.training), self.profile.plain())

    def plan(self, topology: Topology, batch_size: int, activation_bytes: int = 0) -> Planned:
        """Return the plan that a run would use, with memory reserved for activations."""
        planner = self._planner(topology, batch_size, activation_bytes)
        return planner.plan_in_detail(self.prepared.model, self.sharders)

    def fits(self, topology: Topology, batch_size: int, activation_bytes: int = 0) -> bool:
        """Return True if some plan fits into memory."""
        planner = self._planner(topology, batch_size, activation_bytes)
        return planner.fits(self.prepared.model, self.sharders)

    def activation_bytes(self, compute: Compute, batch_size: int) -> int:
        """Return the activation bytes per rank, without the outputs of sharded lookups."""
        return activation_bytes(self.prepared, self.profile, compute, batch_size)

    def _planner(
        self, topology: Topology, batch_size: int, activation_bytes: int
    ) -> RegistryPlanner:
        prepared = self.prepared.with_training({"batch_size": batch_size})
        return prepared.planner(
            topology, profile=self.profile, activation_bytes=activation_bytes, replicate=True
        )


def with_plugins(
    registry: RunConfig, topology: TopologySpec | None = None, data: TrainingData | None = None
) -> ShardableModel:
    """Build the model of a run config and prepare it for planning, as ``recd run`` does.

    The default of ``topology`` are the ranks that ``recd run`` would start on this machine.

    Raises:
        RecdError: the run config has no model, several tables have the same name, or the data is
            missing or invalid.
    """
    with torch.device("meta"):
        model = build_model(registry, registry.dataset.schema())
        if twice := names_of_several(all_tables_of(model)):
            raise SetupError(
                f"{registry.path}: several modules have tables with the same name: "
                f"{shortened(twice)}. Rename these tables."
            )
        context = plan_context(registry, list(embedding_modules(model)), topology, data=data)
        prepared = prepare(registry, model, context)
    assert prepared.context is not None
    return ShardableModel(prepared, prepared.sharders(), prepared.context.data.profile())


def data_of_model(registry: RunConfig) -> RegistryData:
    """Return the training data of a run config. Its readers check ids against the table sizes."""
    with torch.device("meta"):
        model = build_model(registry, registry.dataset.schema())
        return RegistryData(registry, list(embedding_modules(model)))


def largest_batch(fits: Callable[[int], bool], *, start: int, together: int = 1) -> tuple[int, int]:
    """Return the largest batch size that ``fits`` into memory, and the step of the search.

    The search begins at ``start``. Batch sizes are multiples of ``64 * together`` rows.

    Raises:
        NoPlanError: the smallest batch size does not fit.
    """
    least = GRANULE * together
    low, high = 0, max(least, start - start % least)
    while high < _MOST_ROWS and fits(high):
        low, high = high, 2 * high

    def step() -> int:
        found = least
        while 2 * found * _PARTS <= low:
            found *= 2
        return found

    # Steps divide low and high, since these are multiples of the smallest step or doubled.
    while (high - low) > step():
        middle = low + max(step(), (high - low) // 2 // step() * step())
        if middle < _MOST_ROWS and fits(middle):
            low = middle
        else:
            high = middle
    if not low:
        raise NoPlanError(
            f"no plan fits into memory, even with batches of {least} rows per rank. Use more ranks "
            "or smaller tables."
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
    """Plan a run config's model with and without its plugins, for ``recd plan``.

    Args:
        registry: run config, not prepared.
        name: name of the topology.
        spec: the topology.
        batch_size: rows per rank; None for the largest batch that fits, searched per plan.
        say: function that prints progress.
        compute: dense compute of the model; default: counted with ``measure_compute``.

    Raises:
        NoPlanError: the plan with the plugins does not fit.
        RecdError: the run config, data and model contradict each other.
    """
    wrapped_dataset(registry).prepare()
    say("counting the operations of the model")
    compute = compute or measure_compute(registry)
    start = registry.training.batch_size
    if batch_size is not None:
        registry = registry.with_training({"batch_size": batch_size})
    data = data_of_model(registry)

    @cache
    def plugins(rows: int) -> ShardableModel:
        return with_plugins(registry.with_training({"batch_size": rows}), spec, data)

    def largest(what: str, candidates: Callable[[int], ShardableModel]) -> tuple[int, int]:
        refused: RecdError | None = None
        topology = spec.to_torchrec()

        def fits(rows: int) -> bool:
            nonlocal refused
            say(f"looking for the largest batch {what}: {rows:,} rows per rank")
            try:
                candidate = candidates(rows)
            # Entries may refuse a large batch; the data may have fewer rows.
            except (DataError, NoPlanError, RegistryError) as error:
                refused = error
                return False
            return candidate.fits(topology, rows, candidate.activation_bytes(compute, rows))

        together = smallest_batch(wrapped_dataset(registry))
        try:
            return largest_batch(fits, start=start, together=together)
        except NoPlanError as error:
            raise (refused or error) from None

    def variant(what: str, candidates: Callable[[int], ShardableModel]) -> VariantReport:
        size, step = (batch_size, None) if batch_size is not None else largest(what, candidates)
        say(f"planning {what}: batches of {size:,} on {spec.world_size:,} ranks")
        candidate = candidates(size)
        kept = candidate.activation_bytes(compute, size)
        planned = candidate.plan(spec.to_torchrec(), size, kept)
        costs = spec.costs or spec.least_costs
        return report_side(
            candidate, planned, spec, batch_size=size, batch_step=step, compute=compute, costs=costs
        )

    mine = variant("with the plugins", plugins)
    candidate = plugins(mine.batch_size)
    plain, theirs, problem = candidate.as_plain(), None, ""
    try:
        theirs = variant("plain", lambda _: plain)
    except SetupError as error:  # treated as fitting nowhere
        problem = str(error)
    return PlanReport(
        name,
        spec,
        data.profile(),
        mine,
        theirs,
        problem,
        registry.training.wire,
        candidate.prepared.chosen,
    )


def report_side(
    candidate: ShardableModel,
    planned: Planned,
    spec: TopologySpec,
    *,
    batch_size: int,
    batch_step: int | None = None,
    compute: Compute,
    costs: StageCosts,
) -> VariantReport:
    """Estimate memory and time of a plan for batches of ``batch_size`` rows per rank.

    ``batch_step`` is the step of the batch size search; None without a search.
    """
    prepared = candidate.prepared
    works = step_cost_of(
        prepared,
        candidate.tables,
        planned.sharding,
        candidate.profile,
        compute,
        batch_size=batch_size,
        nodes=spec.nodes,
        ranks_per_node=spec.ranks_per_node,
        device_type=spec.device,
    )
    on_hosts = np.zeros(spec.world_size, np.int64)
    for option in planned.options if spec.device == "cuda" else ():
        for shard in option.shards:
            on_hosts[shard.rank] += shard.storage.ddr
    return VariantReport(
        batch_size,
        None if batch_step is None else batch_size,
        batch_step,
        _tables(candidate, planned, batch_size),
        _memory(candidate, planned, spec, candidate.activation_bytes(compute, batch_size)),
        on_hosts,
        predict_stages(works, costs),
    )


def _tables(
    candidate: ShardableModel, planned: Planned, batch_size: int
) -> tuple[PlannedTable, ...]:
    options = {option.name: option for option in planned.options}
    parts, profile = candidate.prepared.plugin_strategies, candidate.profile
    found = []
    for table in candidate.tables:
        if (option := options.get(table.name)) is None:
            continue  # not sharded: each rank has a copy, as for dense layers
        per_rank = Counter[int]()
        for shard in option.shards:
            per_rank[shard.rank] += shard.storage.hbm + shard.storage.ddr
        all_ids = sum(profile.of(feature).length for feature in table.features) * batch_size
        ids = profile.ids(table, batch_size)
        figures = {name: each for part in parts for name, each in part.figures(table.name).items()}
        words = [line for part in parts for line in part.describe(table.name)]
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
                table.name in profile.distinct,
                figures,
                tuple(words),
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
    of_entries = candidate.prepared.plugin_strategies
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
