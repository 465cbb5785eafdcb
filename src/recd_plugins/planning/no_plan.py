"""Why there is no plan, and who takes the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)

from recd_plugins.errors import NoPlanError, SetupError
from recd_plugins.interfaces import Choice
from recd_plugins.model_tables import tables_of
from recd_plugins.planning.storage import RESERVED_SHARE, memory_of_parts
from recd_plugins.planning.table_ranks import TableGroup
from recd_plugins.registry.checked_part import CheckedPart
from recd_plugins.registry.training_spec import TrainingSpec
from recd_plugins.words import shortened

# Tables, entries and groups are named up to so many.
_NAMED = 3


def explain(
    error: PlannerError,
    module: nn.Module,
    constraints: Mapping[str, ParameterConstraints],
    topology: Topology,
    training: TrainingSpec,
    parts: Sequence[CheckedPart],
    options: Sequence[ShardingOption],
    groups: Sequence[TableGroup],
    activation_bytes: int,
    chosen: Choice | None,
) -> SetupError:
    """The error for what TorchRec's planner says of ``options``, of which none could be chosen.

    Args:
        error: TorchRec's.
        module: that is planned.
        constraints: of its tables.
        topology: the ranks.
        training: says the optimizer of the tables.
        parts: of entries.
        options: that were tried.
        groups: of tables whose ranks parts have chosen.
        activation_bytes: that a forward pass of a rank keeps beside its lookups.
        chosen: what a chooser came to; None without one.
    """
    if error.error_type not in (
        PlannerErrorType.INSUFFICIENT_STORAGE,
        PlannerErrorType.STRICT_CONSTRAINTS,
        PlannerErrorType.PARTITION,
    ):
        return SetupError(f"TorchRec's planner: {error}")
    tables = tables_of(module)
    size = {table.name: 4 * table.num_embeddings * table.embedding_dim for table in tables}
    largest = sorted(size, key=lambda name: -size[name])[:_NAMED]
    storage = topology.devices[0].storage
    memory = storage.hbm if topology.compute_device == "cuda" else storage.ddr
    listed = ", ".join(
        f"{name} ({_bytes(size[name])}, {_describe(constraints[name])})" for name in largest
    )
    beside = memory_of_parts(parts, topology.local_world_size, training.optimizer)
    of_parts = "".join(
        f" and {name} {_bytes(held)} a rank" for name, held in beside.items() if held
    )
    kept = f" and a forward pass keeps {_bytes(activation_bytes)}" if activation_bytes else ""
    return NoPlanError(
        f"no plan fits batches of {training.batch_size:,} rows: without them and optimizer state "
        f"the tables take {_bytes(sum(size.values()))}{of_parts}, on {topology.world_size} ranks "
        f"with {_bytes(memory)} each, of which {RESERVED_SHARE:.0%} stay in reserve{kept}; "
        f"the largest: {listed}{_entries(parts, options, topology, training)}{_placed(groups)}"
        f"{_chosen(chosen)}. Use more ranks, smaller batches or smaller tables, or let large "
        "tables be split by rows"
    )


@dataclass(frozen=True)
class _Claim:
    """What an entry takes: bytes of all ranks, and in words of what."""

    part: CheckedPart
    num_bytes: int
    words: Sequence[str]

    def __str__(self) -> str:
        more = len(self.words) - _NAMED
        others = f" and {more} more" if more > 0 else ""
        return f"{self.part.place} takes {', '.join(self.words[:_NAMED])}{others}"


def _entries(
    parts: Sequence[CheckedPart],
    options: Sequence[ShardingOption],
    topology: Topology,
    training: TrainingSpec,
) -> str:
    """The entries whose parts say what they take, that which takes the most first."""
    least: dict[str, ShardingOption] = {}
    for option in sorted(options, key=_num_bytes):
        least.setdefault(option.name, option)
    claims = (_claim(part, list(least.values()), topology, training) for part in parts)
    most = sorted((claim for claim in claims if claim.words), key=lambda claim: -claim.num_bytes)
    if not most:
        return ""
    first = "" if len(most) == 1 else ", the most first"
    return f"; of entries{first}: {'; '.join(map(str, most[:_NAMED]))}"


def _claim(
    part: CheckedPart,
    options: Sequence[ShardingOption],
    topology: Topology,
    training: TrainingSpec,
) -> _Claim:
    """Of tables as the options take least, and of ranks besides."""
    on_ranks = {
        name: held
        for name, held in part.memory_of_rank(topology.local_world_size, training.optimizer).items()
        if held
    }
    of_tables = sorted(
        _of_tables(part, options, topology, training), key=lambda each: -sum(each[1:])
    )
    words = [f"{_bytes(held)} of {name} on each rank" for name, held in on_ranks.items()]
    for table, there, on_host in of_tables:
        besides = f" and {_bytes(on_host)} in host memory" if on_host else ""
        words.append(f"{_bytes(there)} for rows of {table} where they are looked up{besides}")
    total = topology.world_size * sum(on_ranks.values()) + sum(a + b for _, a, b in of_tables)
    return _Claim(part, total, words)


def _of_tables(
    part: CheckedPart,
    options: Sequence[ShardingOption],
    topology: Topology,
    training: TrainingSpec,
) -> Iterator[tuple[str, int, int]]:
    """Bytes where rows of a table are looked up, and those in host memory besides, of all ranks."""
    for option in options:
        rows = [
            part.row_memory(option, shard, training.optimizer, topology.compute_device)
            for shard in option.shards
        ]
        known = [each for each in rows if each is not None]
        if known:
            yield option.name, sum(r.there for r in known), sum(r.on_host for r in known)


def _placed(groups: Sequence[TableGroup]) -> str:
    """The tables whose ranks entries have chosen."""
    if not groups:
        return ""
    more = len(groups) - _NAMED
    others = f" and {more} more" if more > 0 else ""
    return f"; entries say where tables go: {'; '.join(map(str, groups[:_NAMED]))}{others}"


def _chosen(chosen: Choice | None) -> str:
    """What a chooser has put into the place of its entry, and what may be put there instead."""
    if chosen is None or not chosen.offered:
        return ""
    words = "; ".join(f"{offer} for {shortened(names)}" for offer, names in chosen.offered)
    return (
        f"; in place of {chosen.name} stands what it chose before it was known what a forward pass "
        f"keeps: {words}; other shardings may be named there"
    )


def _num_bytes(option: ShardingOption) -> int:
    return int(option.total_storage.hbm + option.total_storage.ddr)


def _describe(constraints: ParameterConstraints) -> str:
    wishes = [*(constraints.compute_kernels or [])]
    kinds = constraints.sharding_types or []
    if 0 < len(kinds) <= 3:
        wishes = [*kinds, *wishes]
    return " ".join(wishes) or "any way"


def _bytes(num_bytes: float) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.1f} {name}"
