"""Cost model of a training step: the work of each rank, and its time in seconds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from recd_plugins.interfaces import StepShape, Table, TableStrategy
from recd_plugins.interfaces.data_profile import DataProfile
from recd_plugins.interfaces.step_cost import STAGES, StageCosts, StageTimes, StepCost
from recd_plugins.sharding.wire import scalar_bytes

#: Bytes of a float32 and of an id.
SCALAR_BYTES, ID_BYTES = 4, 8
_LENGTH_BYTES = 4
#: All ranks, as a slice.
EVERY_RANK = slice(None)
#: Collectives for one sharding of one module: lengths, ids, outputs, gradients.
COLLECTIVES = 4
# Collectives of the input dist; one more for bags with variable batches; share of a collective per
# round of a gloo ring (measured on 4 and 8 ranks).
_OF_IDS, _OF_ROWS, _OF_A_ROUND = 2, 1, 1 / 6
# If tables send nothing else, ranks wait for each other in the all-reduce of gradients.
_WAITED_FOR = 3
# Extra collectives of pooled sums over gloo, by (split within nodes, variable batches); measured on
# 2 x 2, 4 x 1 and 4 x 2 ranks.
_SUMS = {(True, True): 4.0, (True, False): 0.7, (False, True): 3.0}
# Operators of a coalesced table, of a table with deduplicated features, and of coalescing itself.
_COALESCED_OPERATORS, _DEDUPLICATED_OPERATORS, _COALESCING_OPERATORS = 40, 8, 60
#: Reads and writes per byte of a dense parameter in a step: gradient, all-reduce and Adagrad.
LEARNED = 15
# Copies per byte of sequence embeddings between rank and batch order: at the owner, and at the
# receiver of a row-wise table.
_SORTED_THERE, _SORTED_HERE = 4, 6
# Latency of a collective. CPU: inferred from steps over gloo with 100 features; GPU: assumed.
_COLLECTIVE_SECONDS = {"cpu": 1e-3, "cuda": 0.05e-3}
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_ROW_WISE = ShardingType.ROW_WISE.value
# Rows are split over the ranks of one node.
_WITHIN_NODE = {ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value}

_Numbers = NDArray[np.float64]
# Fields of ``StepCost``: a number for all ranks, or an array ``[world_size]``.
_Fields = Mapping[str, float | _Numbers]


@dataclass(frozen=True)
class Operations:
    """Matmul FLOPs, and bytes of elementwise operations, in a forward and backward pass."""

    matmul_flops: float = 0.0
    element_bytes: float = 0.0

    def __sub__(self, other: Operations) -> Operations:
        return Operations(
            self.matmul_flops - other.matmul_flops, self.element_bytes - other.element_bytes
        )

    def __truediv__(self, count: float) -> Operations:
        return Operations(self.matmul_flops / count, self.element_bytes / count)


@dataclass(frozen=True)
class Compute:
    """Operations and activation bytes of a model, without its embedding lookups.

    Attributes:
        pooling, rest: operations of sequence poolings, and other operations, per row of the batch.
        parameter_bytes: bytes of dense parameters.
        operators: number of PyTorch operators in a step, including those of the dense optimizer.
        pooling_saved_bytes, rest_saved_bytes: their activation bytes per row of the batch.
        pools_all_rows: whether sequence poolings also run on duplicates (``pool_rows: all``).
    """

    pooling: Operations
    rest: Operations
    parameter_bytes: int
    operators: int = 0
    pooling_saved_bytes: float = 0.0
    rest_saved_bytes: float = 0.0
    pools_all_rows: bool = False


NO_COMPUTE = Compute(Operations(), Operations(), 0)


def estimate_step_cost(
    tables: Sequence[Table],
    plan: ShardingPlan,
    profile: DataProfile,
    compute: Compute,
    *,
    batch_size: int,
    world_size: int,
    local_world_size: int | None = None,
    parts: Sequence[TableStrategy] = (),
    wire: str = "fp32",
    joined: bool = False,
    gloo: bool = False,
) -> list[StepCost]:
    """Estimate the work of each rank in a training step, as one ``StepCost`` per rank.

    Args:
        tables: all embedding tables of the model.
        plan: sharding plan, for example ``dmp.plan``.
        profile: profile of the features as the model receives them.
        compute: dense compute of the model; see ``measure_compute``.
        batch_size: rows per rank.
        world_size: number of ranks.
        local_world_size: ranks per node; default: all.
        parts: table strategies, which may add costs.
        wire: ``training.wire``.
        joined: whether the ids of all modules are sent in one all-to-all.
        gloo: whether ranks use gloo, whose reduce-scatter is an all-reduce.
    """
    local = local_world_size or world_size
    step = StepShape(batch_size, world_size, local, profile, scalar_bytes(wire, tables))
    by_name = {table.name: table for table in tables}
    totals = {field.name: np.zeros(world_size) for field in fields(StepCost)}

    def add(ranks: slice, work: _Fields) -> None:
        for name, value in work.items():
            totals[name][ranks] += value

    add(EVERY_RANK, _dense_work(tables, compute, step))
    kinds = set[Kind]()
    # One kernel call looks up all tables of a module with the same sharding type.
    calls = defaultdict[tuple[str, str, str], _Numbers](lambda: np.zeros(world_size))
    for path, module in plan.plan.items():
        assert isinstance(module, EmbeddingModuleShardingPlan), "TorchRec's planner makes these"
        for name, sharding in module.items():
            table = by_name[name]
            variable = table.pooled and is_variable_table(table, profile)
            kinds.add(Kind(path, sharding.sharding_type, table.pooled, variable))
            own_share = _sharded_share(name, parts)
            add(EVERY_RANK, _table_work(table, sharding, step, own_share, gloo=gloo))
            alike = calls[path, sharding.sharding_type, sharding.compute_kernel]
            np.maximum(alike, _holders(sharding, world_size), out=alike)
            for part in parts:
                for ranks, work in part.work(table, sharding, step):
                    add(ranks, vars(work))
        add(EVERY_RANK, {"collectives": sum(part.collectives(module) for part in parts)})
    waits = count_collectives(
        kinds, world_size=world_size, local_world_size=local, gloo=gloo, joined=joined
    )
    lookups = sum(calls.values(), np.zeros(world_size))
    add(EVERY_RANK, {"collectives": waits, "lookups": lookups})
    return [
        StepCost(**{name: float(total[rank]) for name, total in totals.items()} | {"steps": 1.0})
        for rank in range(world_size)
    ]


def predict_stages(works: Sequence[StepCost], costs: StageCosts) -> StageTimes:
    """Predict the mean seconds of each stage of a step from the work of each rank.

    Faster ranks wait for slower ones in the all-to-all.
    """
    ranks = [
        StageTimes(**{stage: getattr(costs, stage).seconds(work) for stage in STAGES})
        for work in works
    ]
    own = [rank.lookup + rank.gemm + rank.other for rank in ranks]
    # The mean of differences is exactly 0 seconds for ranks with equal work.
    waiting = sum(max(own) - seconds for seconds in own) / len(own)
    slowest = max(rank.all_to_all for rank in ranks)
    return replace(StageTimes.mean(ranks), all_to_all=slowest + waiting)


def collective_seconds(device_type: str) -> float:
    """Return the assumed latency of a collective, in seconds."""
    return _COLLECTIVE_SECONDS.get(device_type, 0.0)


class Kind(NamedTuple):
    """Properties of tables; tables with equal properties share collectives.

    ``variable`` is True if features may have fewer rows than a batch.
    """

    path: str
    sharding_type: str
    pooled: bool
    variable: bool


def count_collectives(
    kinds: Collection[Kind], *, world_size: int, local_world_size: int, gloo: bool, joined: bool
) -> float:
    """Count the collectives of a step.

    ``joined`` means that the ids of all modules are sent in one all-to-all.
    """
    variable = {kind.path for kind in kinds if kind.variable}  # one is enough
    total, input_dists = 0.0, 0
    for path, kind, pooled in {each[:3] for each in kinds}:
        if kind == _DATA_PARALLEL:
            total += 1  # for gradients
            continue
        total += COLLECTIVES
        input_dists += 1
        within = kind in _WITHIN_NODE
        if not pooled:
            continue
        if path in variable and not joined:
            total += _OF_ROWS
        summing = local_world_size if within else world_size if kind == _ROW_WISE else 1
        if gloo and summing > 1:
            # Otherwise an all-reduce of outputs, and an all-gather of gradients.
            rounds = _OF_A_ROUND * 3 * (world_size - 1)
            total += _SUMS.get((within, path in variable), rounds)
    if gloo and total and not input_dists:
        total += _WAITED_FOR
    return total - (_OF_IDS * max(0, input_dists - 1) if joined else 0)


def bytes_of_tables(
    tables: Sequence[Table],
    shardings: Mapping[str, ParameterSharding],
    profile: DataProfile,
    *,
    batch_size: int,
    world_size: int,
    parts: Sequence[TableStrategy] = (),
    wire_bytes: float = SCALAR_BYTES,
) -> dict[str, float]:
    """Return a dict from table to the bytes per step that all ranks send for its lookups.

    The bytes include ids (input dist) and embeddings with their gradients (output dist), with
    ``wire_bytes`` per scalar. ``batch_size`` is per rank. The ``sharded_share`` of ``parts``
    reduces the bytes.
    """
    step = StepShape(batch_size, world_size, world_size, profile, wire_bytes)
    found = {}
    for table in tables:
        share = _sharded_share(table.name, parts)
        work = _table_work(table, shardings[table.name], step, share)
        sent = (work.get(kind, 0.0) for kind in ("bytes_in_node", "bytes_across_nodes"))
        found[table.name] = float(sum(map(np.sum, sent)))
    return found


def shards_of(table: Table, sharding: ParameterSharding) -> Iterator[tuple[int, float, int]]:
    """Yield (rank, share of the table's rows, number of columns) of each shard of a table."""
    assert isinstance(sharding.sharding_spec, EnumerableShardingSpec), "sharded tables have one"
    for shard in sharding.sharding_spec.shards:
        rows, columns = shard.shard_sizes
        rank = shard.placement.rank() if shard.placement else None
        assert rank is not None, "a plan places every shard on a rank"
        yield rank, rows / table.num_embeddings, columns


def rows_pooled(
    tables: Sequence[Table], profile: DataProfile, compute: Compute, batch_size: int
) -> float:
    """Return the number of batch rows for which sequence poolings run."""
    sequences = [f for table in tables if not table.pooled for f in table.features]
    all_ids = batch_size * sum(profile.of(f).length for f in sequences)
    unique_ids = sum(profile.of(f).ids(batch_size, pooled=True) for f in sequences)
    return batch_size * (unique_ids / all_ids if all_ids and not compute.pools_all_rows else 1.0)


def is_variable_table(table: Table, profile: DataProfile) -> bool:
    """Return True if a table is coalesced or has a deduplicated feature (fewer rows)."""
    return table.name in profile.distinct or any(
        profile.of(feature).deduplicated for feature in table.features
    )


def _sharded_share(table: str, parts: Iterable[TableStrategy]) -> float:
    return math.prod(part.sharded_share(table) for part in parts)


def _holders(sharding: ParameterSharding, world_size: int) -> _Numbers:
    """Return an array ``[world_size]``: 1 for each rank that has a shard of a table, else 0."""
    held = np.zeros(world_size)
    if sharding.sharding_type == _DATA_PARALLEL:
        return held + 1
    held[sharding.ranks or []] = 1
    return held


def _dense_work(tables: Sequence[Table], compute: Compute, step: StepShape) -> _Fields:
    """Return a dict from StepCost field to the dense layers' work on each rank."""
    batch_size, world_size, _, profile, _ = step
    # Unique rows are expanded in forward and backward.
    expanded = sum(
        (batch_size + profile.of(feature).rows(batch_size)) * table.embedding_dim
        for table in tables
        for feature in table.features
        if profile.of(feature).deduplicated
    )
    made_unique, operators = 0.0, float(compute.operators)
    coalesced = {table.pooled for table in tables if table.name in profile.distinct}
    operators += _COALESCING_OPERATORS * len(coalesced)
    for table in tables:
        if any(profile.of(feature).deduplicated for feature in table.features):
            operators += _DEDUPLICATED_OPERATORS
        if (distinct := profile.distinct.get(table.name)) is not None:
            ids = sum(profile.of(f).ids(batch_size, pooled=table.pooled) for f in table.features)
            expanded += (ids + distinct.of(batch_size)) * table.embedding_dim
            made_unique += ids
            operators += _COALESCED_OPERATORS
    pooled = rows_pooled(tables, profile, compute, batch_size)
    operations = {
        name: getattr(compute.rest, name) * batch_size + getattr(compute.pooling, name) * pooled
        for name in ("matmul_flops", "element_bytes")
    }
    operations["element_bytes"] += 2 * SCALAR_BYTES * expanded + LEARNED * compute.parameter_bytes
    return {
        **operations,
        "bytes_reduced": 2 * (world_size - 1) / world_size * compute.parameter_bytes,
        "operators": operators,
        "ids_made_unique": made_unique,
    }


def _table_work(
    table: Table,
    sharding: ParameterSharding,
    step: StepShape,
    own_share: float,
    *,
    gloo: bool = False,
) -> _Fields:
    """Return a dict from StepCost field to one table's work: a number, or one per rank."""
    batch_size, world_size, local, profile, wire_bytes = step
    rows = profile.rows(table, batch_size)
    ids = own_share * profile.ids(table, batch_size)
    if sharding.sharding_type == _DATA_PARALLEL:
        num_bytes = table.num_embeddings * table.embedding_dim * SCALAR_BYTES
        return {
            "ids_looked_up": ids,
            "bytes_looked_up": ids * table.embedding_dim * SCALAR_BYTES,
            "element_bytes": float(LEARNED * num_bytes),
            "bytes_reduced": 2 * (world_size - 1) / world_size * num_bytes,
        }
    read = profile.read.get(table.name)
    updated = world_size * ids if read is None else read.of(world_size * batch_size)
    owners, shares, columns = map(np.array, zip(*shards_of(table, sharding), strict=True))

    def of_owners(values: _Numbers) -> _Numbers:
        return np.bincount(owners, values, world_size).astype(np.float64)

    def of_nodes(values: _Numbers) -> _Numbers:
        return np.add.reduceat(values, range(0, world_size, local))

    within_node = table.pooled and sharding.sharding_type in _WITHIN_NODE
    # A rank sends ids to the owner, which returns a vector per row (sequences: per id). Gradients
    # of the vectors go back.
    sent = ids * shares
    vectors = (rows if table.pooled else sent) * columns * wire_bytes
    inputs = sent * ID_BYTES + rows * _LENGTH_BYTES
    ring = 0.0
    variable = is_variable_table(table, profile)
    if gloo and table.pooled and not variable and sharding.sharding_type == _ROW_WISE:
        # All-reduce of sums, all-gather of their gradients.
        ring, vectors = 3 * (world_size - 1) * float(vectors[0]), np.zeros_like(vectors)
    ring_across = ring / local if local < world_size else 0.0
    in_node = of_owners(inputs + vectors)
    # The ranks of a node share the sums sent to other nodes.
    across = of_nodes(of_owners(inputs + (vectors / local if within_node else vectors)))
    node, nodes = np.arange(world_size) // local, world_size // local
    vectors = of_owners(vectors)
    looked_up = of_owners(world_size * sent * columns * SCALAR_BYTES)
    moved: float | _Numbers = 0.0
    if not table.pooled:
        by_rows = sharding.sharding_type == _ROW_WISE
        here = ids * table.embedding_dim * SCALAR_BYTES if by_rows else 0.0
        moved = _SORTED_THERE * looked_up + _SORTED_HERE * here
    return {
        "ids_looked_up": of_owners(world_size * sent),
        "bytes_looked_up": looked_up,
        "element_bytes": moved,
        "rows_updated": of_owners(np.minimum(world_size * sent, updated * shares)),
        # Sums for other nodes are first reduced within the node, and gathered after.
        "bytes_in_node": of_nodes(in_node)[node]
        - in_node
        + ring
        - ring_across
        + (local - 1) * vectors * (2 * nodes - 1 if within_node else 1),
        "bytes_across_nodes": across.sum()
        - across[node]
        + ring_across
        + (nodes - 1) * vectors * (1 if within_node else local),
    }
