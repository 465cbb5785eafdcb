"""Searches for the fastest plan that fits into memory.

Follows TorchRec's proposers and GreedyPerfPartitioner, with arrays instead of an object per shard.
Plans for 1,024 ranks are therefore much faster.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, reduce
from itertools import product
from math import inf, prod
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    PartitionByType,
    Perf,
    PlannerError,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ShardingType

Ranks = NDArray[np.int64]
Proposal = Sequence["Option"]
#: The option of each table, and the ranks of its shards.
Placement = Mapping["Option", Ranks]
_Numbers = NDArray[np.float64]
# Generator of proposals; is sent the rating of each, or None if the proposal does not fit.
_Proposer = Generator[Proposal, float | None, None]

# Fields of ``Perf.total`` in the order in which they are added.
_TOTAL = ("fwd_compute", "bwd_compute", "fwd_comms", "bwd_comms", "prefetch_compute")
_OF_TOTAL = [[field.name for field in fields(Perf)].index(name) for name in _TOTAL]
# Same limit as TorchRec's GridSearchProposer.
_MOST_OF_GRID = 10_000
# With more ranks or tables, an order stops after this many plans without improvement.
_MANY_RANKS, _MANY_TABLES = 64, 256
_PATIENCE, _LEAST_PATIENCE = 32, 8


@dataclass(frozen=True, eq=False)
class Option:
    """A candidate sharding of one table, with estimates per shard.

    ``storage`` is int64 ``[number of Storage fields, num_shards]``, and ``perf`` is float64
    ``[number of Perf fields, num_shards]`` in milliseconds.
    """

    sharding: ShardingOption
    storage: NDArray[np.int64]
    perf: _Numbers

    @classmethod
    def of(cls, sharding: ShardingOption, estimated: Mapping[tuple[int, ...], Shard]) -> Option:
        """Create an option from TorchRec's; ``estimated`` maps shard sizes to estimates."""
        places = {size: place for place, size in enumerate(estimated)}
        rows = [places[tuple(shard.size)] for shard in sharding.shards]
        for shard in sharding.shards:
            alike = estimated[tuple(shard.size)]
            shard.storage, shard.perf = alike.storage, alike.perf
        storage = [list(vars(shard.storage).values()) for shard in estimated.values()]
        perf = [list(vars(shard.perf).values()) for shard in estimated.values()]
        return cls(
            sharding,
            np.array(storage, np.int64).T[:, rows],
            np.array(perf, np.float64).T[:, rows],
        )

    @cached_property
    def milliseconds(self) -> _Numbers:
        """Return ``Perf.total`` of each shard, float64 ``[num_shards]``."""
        return _total(self.perf)

    @cached_property
    def slowest(self) -> float:
        """Return the milliseconds of the slowest shard."""
        return float(self.milliseconds.max())

    @cached_property
    def every_shard(self) -> float:
        """Return the total milliseconds of all shards, added in TorchRec's order."""
        return sum(self.milliseconds.tolist())

    @cached_property
    def most_storage(self) -> NDArray[np.int64]:
        """Return the storage of the largest shard, int64 ``[number of Storage fields]``."""
        return self.storage.max(axis=1)

    @cached_property
    def total_storage(self) -> list[int]:
        """Return the total storage of all shards, one number per field of Storage."""
        return self.storage.sum(axis=1).tolist()

    @cached_property
    def memory(self) -> tuple[int, int, int, int]:
        """Return device bytes of the largest shard and of all shards, then host bytes of both."""
        device, host, *_ = self.most_storage.tolist()
        devices, hosts, *_ = self.total_storage
        return device, devices, host, hosts

    def on(self, ranks: Iterable[int | None]) -> ShardingOption:
        """Return a copy of TorchRec's option with its shards placed on ``ranks``."""
        found = copy.copy(self.sharding)
        found.shards = [
            Shard(each.size, each.offset, each.storage, each.perf, rank)
            for each, rank in zip(self.sharding.shards, ranks, strict=True)
        ]
        return found


def search(
    options: Sequence[Option],
    free: FreeRanks,
    rate: Callable[[Placement], float],
    *,
    fast: bool = False,
    first: bool = False,
) -> Placement | None:
    """Return the placement with the lowest rating; None if nothing fits.

    ``rate`` returns the milliseconds of a step for a placement. ``fast`` tries only a few
    proposals. ``first`` returns the first placement that fits.
    """
    by_table: dict[str, list[Option]] = defaultdict(list)
    for option in options:
        by_table[option.sharding.fqn].append(option)
    tables = list(by_table.values())
    best: Placement | None = None
    best_rating = inf
    ratings: dict[tuple[int, ...], float | None] = {}
    for proposer in _proposers(tables, len(free.every), fast):
        rating = None
        try:
            proposal = next(proposer)
            while True:
                key = tuple(map(id, proposal))
                if key in ratings:
                    rating = ratings[key]
                else:
                    placed = place(proposal, copy.copy(free))
                    rating = ratings[key] = None if placed is None else rate(placed)
                    if placed is not None and rating is not None and rating < best_rating:
                        best, best_rating = placed, rating
                        if first:
                            return best
                proposal = proposer.send(rating)
        except StopIteration:
            pass
    return best


def _proposers(
    tables: Sequence[Sequence[Option]], world_size: int, fast: bool
) -> Iterator[_Proposer]:
    slowest, every_shard = attrgetter("slowest"), attrgetter("every_shard")
    if fast:
        inner = [_greedy(tables, every_shard, _LEAST_PATIENCE)]
    elif world_size <= _MANY_RANKS and len(tables) <= _MANY_TABLES:
        inner = [_grid(tables), _greedy(tables, slowest), _greedy(tables, every_shard)]
    else:
        patience = min(_PATIENCE, max(_LEAST_PATIENCE, _PATIENCE * _MANY_TABLES // len(tables)))
        inner = [_greedy(tables, key, patience) for key in (slowest, every_shard)]
    return (_with_quickest_kernels(each, tables) for each in (*inner, _uniform(tables)))


def _grid(tables: Sequence[Sequence[Option]]) -> _Proposer:
    """Propose all combinations of options, or nothing if there are too many combinations."""
    if prod(map(len, tables)) <= _MOST_OF_GRID:
        in_order = (sorted(options, key=attrgetter("slowest")) for options in tables)
        for proposal in product(*in_order):  # noqa: UP028
            yield proposal


def _greedy(
    tables: Sequence[Sequence[Option]],
    milliseconds: Callable[[Option], float],
    patience: float = inf,
) -> _Proposer:
    """Propose each table's fastest option, then slower ones for the table with most memory."""
    left = [sorted(options, key=milliseconds)[::-1] for options in tables]
    best, worse = inf, 0
    while True:
        rating = yield [options[-1] for options in left]
        if rating:
            worse = 0 if rating < best else worse + 1
            best = min(best, rating)
            if worse > patience:
                return
        largest, most = None, (0, 0, 0, 0)
        for options in left:
            if len(options) > 1 and options[-1].memory > most:
                largest, most = options, options[-1].memory
        if largest is None:
            return
        largest.pop()


def _uniform(tables: Sequence[Sequence[Option]]) -> _Proposer:
    """Propose one sharding type for all tables, and each table's fastest option of this type."""
    by_type: dict[str, list[Option]] = defaultdict(list)
    for options in tables:
        for kind in dict.fromkeys(each.sharding.sharding_type for each in options):
            alike = (each for each in options if each.sharding.sharding_type == kind)
            by_type[kind].append(min(alike, key=attrgetter("slowest")))
    for proposal in by_type.values():
        if len(proposal) == len(tables):
            yield proposal


def _with_quickest_kernels(inner: _Proposer, tables: Sequence[Sequence[Option]]) -> _Proposer:
    """Yield the proposals of ``inner``, then its best proposal with faster kernels.

    A greedy search may end with kernels that read host memory although device memory is free.
    """
    best: Proposal = ()
    best_rating = inf
    proposal = next(inner, None)
    while proposal is not None:
        rating = yield proposal
        if rating is not None and rating < best_rating:
            best, best_rating = proposal, rating
        try:
            proposal = inner.send(rating)
        except StopIteration:
            break
    alike: dict[tuple[str, str], list[Option]] = defaultdict(list)
    for option in (each for options in tables for each in options):
        alike[option.sharding.fqn, option.sharding.sharding_type].append(option)
    quickest = [
        min(
            (each, *alike[each.sharding.fqn, each.sharding.sharding_type]),
            key=attrgetter("slowest"),
        )
        for each in best
    ]
    slow = [place for place, each in enumerate(best) if quickest[place] is not each]
    if not slow or (yield quickest) is not None:
        return
    for changed in reversed(slow if len(slow) > 1 else []):
        proposal = [quickest[at] if at == changed else each for at, each in enumerate(best)]
        rating = yield proposal
        if rating is not None and rating < best_rating:
            best, best_rating = proposal, rating


class FreeRanks:
    """Free bytes, int64 ``[3, world_size]``, and load of all ranks during placement."""

    def __init__(self, topology: Topology, storage: NDArray[np.int64]) -> None:
        self.topology = topology
        self.every: Ranks = np.arange(topology.world_size)
        self.storage = storage
        self.perf = np.zeros((len(fields(Perf)), len(self.every)))
        self.busy = np.zeros(len(self.every))
        self._least = storage.min(axis=1)
        local = topology.local_world_size
        # Ties go to the first rank of each node, then to the second.
        self._in_order = np.lexsort((self.every, self.every % local))
        size = getattr(topology, "intra_group_size", local)  # since torchrec 1.8
        self._nodes = self.every[: len(self.every) // size * size].reshape(-1, size)

    def __copy__(self) -> FreeRanks:
        copied = object.__new__(FreeRanks)
        vars(copied).update(vars(self))
        for name in ("storage", "perf", "busy", "_least"):
            setattr(copied, name, getattr(self, name).copy())
        return copied

    def place_on_all(self, option: Option) -> Ranks | None:
        """Place one shard per rank, and return the ranks; return None if memory is insufficient."""
        return self.every if self._takes_each(option, slice(None)) else None

    def place(self, option: Option) -> Ranks | None:
        """Place an option's shards on the least loaded ranks or node; None if memory is full."""
        if option.sharding.partition_by == PartitionByType.DEVICE.value:
            return self._on_some(option, self._in_order)
        if option.sharding.sharding_type == ShardingType.TABLE_ROW_WISE.value:
            return self._on_a_node(option)
        for node in self._nodes[np.argsort(self._busy_nodes(), kind="stable")]:
            before = self.storage[:, node], self.perf[:, node], self.busy[node]
            if (placed := self._on_some(option, node)) is not None:
                return placed
            self.storage[:, node], self.perf[:, node], self.busy[node] = before
        return None

    def place_by_torchrec(self, options: Sequence[Option]) -> list[Ranks] | None:
        """Place options with TorchRec's partitioner; return the ranks per option, or None."""
        topology = copy.deepcopy(self.topology)
        free = zip(topology.devices, self.storage.T.tolist(), self.perf.T.tolist(), strict=True)
        for device, storage, perf in free:
            device.storage, device.perf = Storage(*storage), Perf(*perf)
        shardings = [each.on(each.sharding.get_shards_assignment()) for each in options]
        try:
            GreedyPerfPartitioner().partition(shardings, topology)
        except PlannerError:
            return None
        return [np.array(each.get_shards_assignment()) for each in shardings]

    def _busy_nodes(self) -> _Numbers:
        return reduce(np.add, self.busy[self._nodes].T)

    def _on_a_node(self, option: Option) -> Ranks | None:
        if option.storage.shape[1] != self._nodes.shape[1]:
            return None
        busy = self._busy_nodes()
        if not (option.most_storage <= self._least).all():
            left = self.storage[:, self._nodes]
            busy[~(option.storage[:, None] <= left).all(axis=(0, 2))] = np.inf
        node = self._nodes[busy.argmin()]
        return node if self._takes_each(option, node) else None

    def _takes_each(self, option: Option, ranks: Ranks | slice) -> bool:
        left = self.storage[:, ranks]
        if option.storage.shape != left.shape or (option.storage > left).any():
            return False
        self._take(ranks, option.storage, option.perf)
        return True

    def _on_some(self, option: Option, ranks: Ranks) -> Ranks | None:
        """Place shards one by one on the least loaded of ``ranks``; None if memory is full."""
        placed = []
        for storage, perf in zip(option.storage.T, option.perf.T, strict=True):
            busy = self.busy[ranks]
            if not (storage <= self._least).all():
                fits = (storage[:, None] <= self.storage[:, ranks]).all(axis=0)
                if not fits.any():
                    return None
                busy[~fits] = np.inf
            rank = ranks[busy.argmin()]
            self._take(rank, storage, perf)
            placed.append(rank)
        return np.array(placed)

    def _take(self, ranks: Any, storage: Ranks, perf: _Numbers) -> None:
        self.storage[:, ranks] -= storage
        self.perf[:, ranks] += perf
        self.busy[ranks] = _total(self.perf[:, ranks])
        left = self.storage[:, ranks].reshape(len(self._least), -1)
        np.minimum(self._least, left.min(axis=1), out=self._least)


def place(proposal: Proposal, free: FreeRanks) -> Placement | None:
    """Place the options of all tables; return None if memory is insufficient."""
    placed: dict[Option, Ranks] = {}
    others: list[Option] = []
    for option in proposal:
        if option.sharding.partition_by == PartitionByType.UNIFORM.value:
            if (found := free.place_on_all(option)) is None:
                return None
            placed[option] = found
        else:
            others.append(option)
    if not all(map(_is_simple, others)):
        if (ranks := free.place_by_torchrec(others)) is None:
            return None
        placed |= zip(others, ranks, strict=True)
    else:
        for option in sorted(others, key=lambda each: each.total_storage, reverse=True):
            if (found := free.place(option)) is None:
                return None
            placed[option] = found
    return {option: placed[option] for option in proposal}


def _is_simple(option: Option) -> bool:
    """Return True if ``FreeRanks.place`` supports an option."""
    sharding = option.sharding
    return (
        sharding.partition_by in (PartitionByType.HOST.value, PartitionByType.DEVICE.value)
        and sharding.dependency is None
        and sharding.compute_kernel != EmbeddingComputeKernel.KEY_VALUE.value
    )


def _total(perf: _Numbers) -> _Numbers:
    """Return ``Perf.total``, computed from an array with one row per field."""
    compute, backward, sent, received, fetched = (perf[field] for field in _OF_TOTAL)
    return compute + backward + sent + received + fetched
