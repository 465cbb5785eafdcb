"""Collectives of a step, counted from the kinds of tables that a plan has."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

from torchrec.distributed.types import ShardingType

from recd_plugins.interfaces import Table
from recd_plugins.values.data_profile import DataProfile

#: Collectives of one kind of sharding of one module, in a step: lengths, ids, outputs, gradients.
COLLECTIVES = 4
# Of them, those of the input dist.
_OF_IDS = 2
# As much more do bags take whose features have different numbers of rows; sequences take no more.
_OF_ROWS = 1
# And as much of a collective does each round in which gloo passes sums around: of 4 and 8 ranks 1.1
# to 2.0 and 2.7 to 3.1 collectives were counted for 9 and 21 rounds.
_OF_A_ROUND = 1 / 6
# Collectives' time has in it what ranks wait for one another, as they do in sums of gradients where
# tables send nothing else: 3.7 to 4.9 collectives of 4 x 1 and 2 x 2 ranks, 0.4 on slower links.
_WAITED_FOR = 3
# What sums of bags take besides over gloo, in collectives, by whether tables are split within nodes
# and whether features have other numbers of rows than one another: then 3.5 to 5.0 were measured
# within nodes and 2.4 to 3.8 over all ranks, 2 x 2, 4 x 1 and 4 x 2, nearly all processor time.
_SUMS = {(True, True): 4.0, (True, False): 0.7, (False, True): 3.0}
#: Rows are split over all ranks.
ROW_WISE = ShardingType.ROW_WISE.value
#: Rows are split over the ranks of one node.
WITHIN_NODE = {ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value}


class Kind(NamedTuple):
    """What tables of a module have in common that are looked up by the same collectives.

    Attributes:
        path: of the module.
        sharding_type: as TorchRec names it.
        pooled: whether they are of bags.
        variable: whether features of the table may have fewer rows than a batch.
    """

    path: str
    sharding_type: str
    pooled: bool
    variable: bool


def collectives_of(
    kinds: Set[Kind], *, world_size: int, local_world_size: int, gloo: bool, joined: bool
) -> float:
    """Collectives of a step.

    Args:
        kinds: all of a plan.
        world_size: ranks.
        local_world_size: ranks of a node.
        gloo: whether it is gloo that sends.
        joined: whether lengths, ids and numbers of rows of all modules come at once, as
            ``JoinedIds`` has them.
    """
    variable = {kind.path for kind in kinds if kind.variable}  # one feature makes all of them so
    total, input_dists = 0.0, 0
    for path, kind, pooled in {each[:3] for each in kinds}:
        if kind == ShardingType.DATA_PARALLEL.value:
            total += 1  # of gradients
            continue
        total += COLLECTIVES
        input_dists += 1
        if not pooled:
            continue
        is_variable = path in variable
        if is_variable and not joined:
            total += _OF_ROWS
        within = kind in WITHIN_NODE
        if not (gloo and (within or kind == ROW_WISE)):
            continue
        if (local_world_size if within else world_size) == 1:
            continue
        # Else an all-reduce of outputs, and an all-gather of gradients.
        rounds = _OF_A_ROUND * 3 * (world_size - 1)
        total += _SUMS.get((within, is_variable), rounds)
    if gloo and total and not input_dists:
        total += _WAITED_FOR
    return total - (_OF_IDS * max(0, input_dists - 1) if joined else 0)


def variable_bags(tables: Iterable[Table], profile: DataProfile) -> set[str]:
    """The names of pooled tables of which features may have fewer rows than a batch."""
    return {table.name for table in tables if table.pooled and is_variable_table(table, profile)}


def is_variable_table(table: Table, profile: DataProfile) -> bool:
    """Whether features of a table may have fewer rows than a batch."""
    return table.name in profile.distinct or any(
        profile.of(feature).deduplicated for feature in table.features
    )
