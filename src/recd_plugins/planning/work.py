"""What one training step does on each rank, from model, plan and profile, without a cluster."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from recd_plugins.distributed.wire import scalar_bytes
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import StepShape, Table, TablePart
from recd_plugins.planning.collectives import (
    ROW_WISE,
    WITHIN_NODE,
    Kind,
    collectives_of,
    is_variable_table,
    variable_bags,
)
from recd_plugins.planning.compute import Compute, KeptActivations
from recd_plugins.values.data_profile import DataProfile
from recd_plugins.values.work import Work

#: Bytes of a float32.
SCALAR_BYTES = 4
#: Bytes of an id.
ID_BYTES = 8
LENGTH_BYTES = 4
#: Of equal gradients that are sent once, for each row which of them it gets.
NUMBER_BYTES = 2
#: Ranks of work that all do.
EVERY_RANK = slice(None)
# Operators besides for a table whose ids are coalesced and for one whose features are deduplicated.
# In steps on CPU 21 to 26 and 7 to 8 were counted; the rest of the 40 is estimated, of compiled
# kernels and the arrays that they take.
_COALESCED_OPERATORS, _DEDUPLICATED_OPERATORS = 40, 8
# Likewise for tables of a kind, once: with one such table processors of a rank took 0 and 0.4 ms
# more of a step, two runs, though it sent less; 0.4 are some 100 operators by their rate there.
_COALESCING_OPERATORS = 60
# Times that the bytes of a sequence's embeddings are read or written to put them into the order of
# ranks where they are looked up, and of the batch where parts of a table's rows arrive: forward by
# a copy, backward by another there and by a sum into zeros here.
_SORTED_THERE, _SORTED_HERE = 4, 6
# As many bytes of rows move in the time in which FBGEMM finds the owner of an id, where ranks share
# a table's rows: 16 to 23 ns, 310 to 460 bytes, of 20,000 to 200,000 ids of 4 and 8 ranks.
_BYTES_PER_OWNER = 320
#: Times that the bytes of a dense parameter are read or written in a step: its gradient is zeroed
#: and averaged, and Adagrad adds its square, takes a root and divides by it. By the rate at which
#: ``recd calibrate`` moves rows 7 were timed of 0.6 and 6 MB, 28 of 64 MB; row-wise Adagrad alike.
LEARNED = 15

_Numbers = NDArray[np.float64]
# Of ``Work``: of every rank alike, or ``[world_size]``.
_Fields = Mapping[str, float | _Numbers]
# What is in no ``Work``: embeddings that a rank sends to other nodes, and gradients that come back.
_OUTPUT, _RETURNED = "output", "returned"


def work_of_step(
    tables: Sequence[Table],
    plan: ShardingPlan,
    profile: DataProfile,
    compute: Compute,
    *,
    batch_size: int,
    world_size: int,
    local_world_size: int | None = None,
    parts: Sequence[TablePart] = (),
    wire: str = "fp32",
    overlapped: bool = False,
    gloo: bool = False,
    learns_by_fbgemm: bool = False,
) -> list[Work]:
    """The work of each rank.

    Args:
        tables: of the model, ``all_tables_of``.
        plan: where each of them is; of TorchRec's planner or of a sharded model (``dmp.plan``).
        profile: of the features as this side takes them; ``profile.plain()`` for the baseline.
        compute: what the model's other parts do, ``measure_compute``.
        batch_size: rows of a rank.
        world_size: ranks.
        local_world_size: ranks of a node; all of them without it.
        parts: of entries, which know what they do beside sharded lookups.
        wire: format of embeddings and gradients between ranks.
        overlapped: as for ``predict_stages``; links carry gradients of dense layers once a node,
            and on gloo ids of all modules come at once.
        gloo: whether it is gloo that sends, whose reduce-scatter is an all-reduce.
        learns_by_fbgemm: whether rows learn by FBGEMM's own row-wise Adagrad on a CPU.

    Raises:
        PluginError: a part has work of ranks that are not there.
    """
    local = local_world_size or world_size
    step = StepShape(batch_size, world_size, local, profile, scalar_bytes(wire, tables))
    by_name = {table.name: table for table in tables}
    totals = {field.name: np.zeros(world_size) for field in fields(Work)}

    def add(ranks: slice, work: _Fields) -> None:
        for name, value in work.items():
            totals[name][ranks] += value

    dense = _dense_work(tables, compute, step)
    if overlapped and 1 < local < world_size:
        # In a ring of all ranks a link carries what one of them sends.
        in_ring, once = ((count - 1) / count for count in (world_size, world_size // local))
        dense = replace(dense, bytes_reduced=dense.bytes_reduced * once / in_ring)
    add(EVERY_RANK, vars(dense))
    output, returned, kinds = np.zeros(world_size), np.zeros(world_size), set[Kind]()
    # Tables of a module that are sharded alike are looked up in one call of a kernel.
    calls = defaultdict[tuple[str, str, str], _Numbers](lambda: np.zeros(world_size))
    variable = variable_bags(tables, profile)
    equal_once = gloo and local < world_size and wire != "int8"
    for path, module in plan.plan.items():
        assert isinstance(module, EmbeddingModuleShardingPlan), "TorchRec's planner makes these"
        for name, sharding in module.items():
            table = by_name[name]
            kinds.add(Kind(path, sharding.sharding_type, table.pooled, name in variable))
            own_share = _sharded_share(name, parts)
            of_table = _table_work(
                table, sharding, step, own_share, gloo=gloo, equal_once=equal_once
            )
            alike = calls[path, sharding.sharding_type, sharding.compute_kernel]
            np.maximum(alike, np.minimum(of_table["tables_looked_up"], 1), out=alike)
            output += of_table.get(_OUTPUT, 0.0)
            returned += of_table.get(_RETURNED, 0.0)
            beside = (_OUTPUT, _RETURNED)
            add(EVERY_RANK, {name: work for name, work in of_table.items() if name not in beside})
            if learns_by_fbgemm and not table.pooled:
                learnt = of_table.get("rows_updated", 0.0)
                add(EVERY_RANK, {"sequence_rows_updated_by_fbgemm": learnt})
            for part in parts:
                for ranks, work in part.work(table, sharding, step):
                    if not range(world_size)[ranks]:
                        raise PluginError(
                            f"{part}: work returned work of ranks {ranks.start} to {ranks.stop}, "
                            f"and there are {world_size}"
                        )
                    add(ranks, vars(work))
        add(EVERY_RANK, {"collectives": sum(part.collectives(module) for part in parts)})
    of_kinds = collectives_of(
        kinds,
        world_size=world_size,
        local_world_size=local,
        gloo=gloo,
        joined=overlapped and gloo,
    )
    add(EVERY_RANK, {"collectives": of_kinds, "lookups": sum(calls.values(), np.zeros(world_size))})
    if learns_by_fbgemm:
        totals["rows_updated_by_fbgemm"] += totals["rows_updated"]
    # Ranks of a node share its link where it is gloo that sends.
    sharing = local if gloo else 1
    waited_for = _waited_for(totals["bytes_across_nodes"], output, returned, sharing)
    add(EVERY_RANK, {"bytes_waited_for": waited_for})
    return [
        Work(**{name: float(total[rank]) for name, total in totals.items()} | {"steps": 1.0})
        for rank in range(world_size)
    ]


def _waited_for(sent: _Numbers, output: _Numbers, returned: _Numbers, sharing: int) -> float:
    """Bytes across nodes of the link that carries most, beside the mean of all.

    The link with the most embeddings is waited for in the output dist, and again when all others
    send it their gradients.

    Args:
        sent: of each rank.
        output: of them, embeddings of its shards.
        returned: gradients of these that it gets.
        sharing: ranks that share a link.
    """

    def most(of_ranks: _Numbers) -> float:
        return float(of_ranks.reshape(-1, sharing).mean(1).max())

    return max(0.0, most(output) + max(most(returned), most(sent - output)) - float(sent.mean()))


def bytes_of_tables(
    tables: Sequence[Table],
    shardings: Mapping[str, ParameterSharding],
    profile: DataProfile,
    *,
    batch_size: int,
    world_size: int,
    parts: Sequence[TablePart] = (),
    wire_bytes: float = SCALAR_BYTES,
) -> dict[str, float]:
    """What all ranks together send in the input dist and output dist of each table, in one step.

    The gradients that come back through the output dist in the backward pass are in it. Tables that
    are on every rank send nothing here: what reduces their gradients is not in it; nor is what
    parts do beside sharded lookups.

    Args:
        tables: those to tell of.
        shardings: where each is, by name.
        profile: of their features; equal gradients that it knows of are sent once.
        batch_size: rows of a rank.
        world_size: ranks.
        parts: that know which ids go elsewhere than to a table's shards.
        wire_bytes: of a scalar of embeddings and their gradients between ranks.
    """
    step = StepShape(batch_size, world_size, world_size, profile, wire_bytes)
    added = {
        table.name: _table_work(
            table,
            shardings[table.name],
            step,
            _sharded_share(table.name, parts),
            equal_once=True,
        )
        for table in tables
    }
    kinds = ("bytes_in_node", "bytes_across_nodes")
    return {
        name: float(sum(np.sum(work[kind]) for kind in kinds if kind in work))
        for name, work in added.items()
    }


def _sharded_share(table: str, parts: Sequence[TablePart]) -> float:
    """The share of a table's ids that go to its shards."""
    return math.prod(part.sharded_share(table) for part in parts)


def rows_pooled(
    tables: Sequence[Table], profile: DataProfile, compute: KeptActivations, batch_size: int
) -> float:
    """Rows of a batch that sequence poolings see: its unique ones, if these are pooled alone."""
    sequences = [f for table in tables if not table.pooled for f in table.features]
    all_ids = batch_size * sum(profile.of(f).length for f in sequences)
    # Poolings see unique rows, whatever ids of them are stored once.
    unique_ids = sum(profile.of(f).ids(batch_size, pooled=True) for f in sequences)
    share = unique_ids / all_ids if all_ids and not compute.pools_all_rows else 1.0
    return batch_size * share


def _dense_work(tables: Sequence[Table], compute: Compute, step: StepShape) -> Work:
    """What every rank does apart from its tables."""
    batch_size, world_size, profile = step.batch_size, step.world_size, step.profile
    expanded = sum(
        (batch_size + profile.of(feature).rows(batch_size)) * table.embedding_dim
        for table in tables
        for feature in table.features
        if profile.of(feature).deduplicated
    )
    coalesced = {table.pooled for table in tables if table.name in profile.distinct}
    made_unique, operators = 0.0, compute.operators + _COALESCING_OPERATORS * len(coalesced)
    for table in tables:
        if table.name in profile.distinct:
            operators += _COALESCED_OPERATORS
        if any(profile.of(feature).deduplicated for feature in table.features):
            operators += _DEDUPLICATED_OPERATORS
        if (distinct := profile.distinct.get(table.name)) is not None:
            ids = sum(profile.of(f).ids(batch_size, pooled=table.pooled) for f in table.features)
            # Each id takes the row of its distinct one.
            expanded += (ids + distinct.of(batch_size)) * table.embedding_dim
            made_unique += ids
    pooled_rows = rows_pooled(tables, profile, compute, batch_size)
    return Work(
        bytes_reduced=2 * (world_size - 1) / world_size * compute.parameter_bytes,
        matmul_flops=compute.rest.matmul_flops * batch_size
        + compute.pooling.matmul_flops * pooled_rows,
        matmul_bytes=compute.rest.matmul_bytes * batch_size
        + compute.pooling.matmul_bytes * pooled_rows,
        attention_flops=compute.rest.attention_flops * batch_size
        + compute.pooling.attention_flops * pooled_rows,
        attention_queries=compute.rest.attention_queries * batch_size
        + compute.pooling.attention_queries * pooled_rows,
        # Duplicates are made again from what is stored once, forward and backward.
        element_bytes=compute.rest.element_bytes * batch_size
        + compute.pooling.element_bytes * pooled_rows
        + 2 * SCALAR_BYTES * expanded
        + LEARNED * compute.parameter_bytes,
        operators=operators,
        products=compute.products,
        ids_read=batch_size
        * sum(profile.of(feature).length for table in tables for feature in table.features),
        ids_made_unique=made_unique,
    )


def _table_work(
    table: Table,
    sharding: ParameterSharding,
    step: StepShape,
    own_share: float,
    *,
    gloo: bool = False,
    equal_once: bool = False,
) -> _Fields:
    """What a table adds to the work of ranks: as owners of shards, and as senders of ids."""
    batch_size, world_size, local, profile, wire_bytes = step
    rows = profile.rows(table, batch_size)
    ids = own_share * profile.ids(table, batch_size)
    read = profile.read.get(table.name)
    updated = world_size * ids if read is None else read.of(world_size * batch_size)
    variable = is_variable_table(table, profile)
    if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
        num_bytes = table.num_embeddings * table.embedding_dim * SCALAR_BYTES
        return {
            "ids_looked_up": ids,
            "bytes_looked_up": ids * table.embedding_dim * SCALAR_BYTES,
            "tables_looked_up": 1.0,
            "element_bytes": float(LEARNED * num_bytes),
            "bytes_reduced": 2 * (world_size - 1) / world_size * num_bytes,
        }
    owners, shares, columns = map(np.array, zip(*shards_of(table, sharding), strict=True))
    parts_of_rows = round(1 / float(shares.mean()))
    shares, read_shares = _shares_of_reads(table, sharding, profile, shares, own_share)

    def of_owners(values: _Numbers) -> _Numbers:
        return np.bincount(owners, values, world_size).astype(np.float64)

    def of_nodes(values: _Numbers) -> _Numbers:
        return np.add.reduceat(values, range(0, world_size, local))

    within_node = table.pooled and sharding.sharding_type in WITHIN_NODE
    # A rank sends its ids to the owner, which sends an embedding to each rank for each of its rows
    # or, of a sequence, of its ids; the gradients of these come back.
    sent = ids * shares
    vectors = (rows if table.pooled else sent) * columns * wire_bytes
    inputs = sent * ID_BYTES + rows * LENGTH_BYTES
    ring = 0.0
    if gloo and table.pooled and not variable and sharding.sharding_type == ROW_WISE:
        # Sums are all-reduced, their gradients gathered: a link carries what one rank sends.
        ring, vectors = 3 * (world_size - 1) * float(vectors[0]), np.zeros_like(vectors)
    ring_across = ring / local if local < world_size else 0.0
    gradients, back = vectors, None
    if equal_once and (known := profile.gradients.get(table.name)) is not None:
        differ = known.share(own_share, parts_of_rows, coalesced=table.name in profile.distinct)
        gradients = back = np.minimum(vectors, differ * vectors + NUMBER_BYTES * sent)
    in_node = of_owners(inputs + gradients)
    # Of the ranks of a node that hold parts of one sum, each sends a part of it elsewhere.
    across = of_nodes(of_owners(inputs + (vectors / local if within_node else gradients)))
    node = np.arange(world_size) // local
    nodes = world_size // local
    vectors, held = of_owners(vectors), of_owners(np.ones_like(sent))
    output = (nodes - 1) * vectors * (1 if within_node else local)
    looked_up = of_owners(world_size * sent * columns * SCALAR_BYTES)
    moved: float | _Numbers = 0.0
    if not table.pooled:
        here = sharding.sharding_type == ROW_WISE and ids * table.embedding_dim * SCALAR_BYTES
        moved = _SORTED_THERE * looked_up + _SORTED_HERE * here
    if parts_of_rows > 1:
        moved += _BYTES_PER_OWNER * ids
    return {
        "ids_looked_up": of_owners(world_size * sent),
        "bytes_looked_up": looked_up,
        "element_bytes": moved,
        "rows_updated": of_owners(np.minimum(world_size * sent, updated * read_shares)),
        "tables_looked_up": held,
        "rows_looked_up": world_size * rows * held if table.pooled and variable else 0.0,
        # The sums for other nodes are reduced in the node first, and gathered after.
        "bytes_in_node": of_nodes(in_node)[node]
        - in_node
        + ring
        - ring_across
        + (local - 1) * vectors * (2 * nodes - 1 if within_node else 1),
        "bytes_across_nodes": across.sum() - across[node] + ring_across + output,
        _OUTPUT: output,
        _RETURNED: output if back is None else (nodes - 1) * local * of_owners(back),
    }


def _shares_of_reads(
    table: Table,
    sharding: ParameterSharding,
    profile: DataProfile,
    shares: _Numbers,
    own_share: float,
) -> tuple[_Numbers, _Numbers]:
    """Of each shard, the share of a table's ids that it is sent, and of the rows that are read.

    Where parts keep ids from the shards, which are of the rows that are read most, the others are
    taken as read alike.
    """
    spread = profile.spread.get(table.name)
    if spread is None or own_share < 1 or not (shares < 1).any():
        return shares, shares
    spec = sharding.sharding_spec
    assert isinstance(spec, EnumerableShardingSpec), "sharded tables have one"
    starts = np.array([shard.shard_offsets[0] for shard in spec.shards]) / table.num_embeddings
    bounds = np.stack([starts, starts + shares], axis=1)
    of_rows = spread.between(spread.rows, bounds)
    if table.name in profile.distinct:
        return of_rows, of_rows
    return spread.between(spread.ids, bounds), of_rows


def shards_of(table: Table, sharding: ParameterSharding) -> Iterator[tuple[int, float, int]]:
    """The shards of a table: their rank, their share of its rows, their columns."""
    assert isinstance(sharding.sharding_spec, EnumerableShardingSpec), "sharded tables have one"
    for shard in sharding.sharding_spec.shards:
        rows, columns = shard.shard_sizes
        placement = shard.placement
        assert placement is not None, "a plan places every shard"
        rank = placement.rank()
        assert rank is not None, "a plan places every shard on a rank"
        yield rank, rows / table.num_embeddings, columns
