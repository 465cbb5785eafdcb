"""The order in which TorchRec's planner tries plans, and when it stops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torchrec.distributed.planner.proposers import GridSearchProposer
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology

from recd_plugins.planning.quick_option import QuickOption, quick
from recd_plugins.planning.quick_proposers import Greedy, Uniform, every_shard, slowest_shard

# TorchRec tries every proposal, each of which places a shard of each table on each rank. From so
# many ranks on it is told to give up an order of trying after so many plans that are no better.
# The same goes for many tables, as there are proposals for each of them.
_MANY_RANKS = 64
_MANY_TABLES = 256
_PATIENCE = 32
_HASTE = 8


def proposers(world_size: int, num_tables: int) -> list[Proposer]:
    """Return TorchRec's own, with less patience for many ranks or tables.

    For the same numbers they are always the same.
    """
    if world_size <= _MANY_RANKS and num_tables <= _MANY_TABLES:
        return _with_quickest(
            GridSearchProposer(),
            Greedy(slowest_shard),
            Greedy(every_shard),
            Uniform(),
        )
    patience = min(_PATIENCE, max(_HASTE, _PATIENCE * _MANY_TABLES // num_tables))
    return _with_quickest(
        Greedy(slowest_shard, patience=patience),
        Greedy(every_shard, patience=patience),
        Uniform(),
    )


def few_proposers() -> list[Proposer]:
    """Those that find a plan near the best one soon, for who compares many plans."""
    return _with_quickest(Greedy(every_shard, patience=_HASTE), Uniform())


def _with_quickest(*inner: Proposer) -> list[Proposer]:
    return [QuickestKernels(each) for each in inner]


class QuickestKernels(Proposer):
    """The proposals of another and, after them, the best with quicker kernels of its tables.

    The greedy proposers move one table at a time on to what is slower by itself. So they may find
    that all tables of a module do best in one sharding type where few collectives serve them, but
    with kernels that read the memory of the host while the device has room.

    Args:
        inner: makes the first proposals.
    """

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self._options: Sequence[ShardingOption] = ()
        self._at_end = False
        self._best: list[ShardingOption] = []
        self._rating = float("inf")
        # Tables of the best plan to take the quickest kernel of: all of them, then one by one.
        self._left: list[list[int]] = []
        self._quickest: list[ShardingOption] = []

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """See TorchRec's ``Proposer.load``."""
        self._inner.load(search_space, enumerator)
        self._options = search_space
        self._at_end, self._best, self._rating = False, [], float("inf")

    def propose(self) -> list[ShardingOption] | None:
        """See TorchRec's ``Proposer.propose``."""
        if not self._at_end:
            proposal: list[ShardingOption] | None = self._inner.propose()
            if proposal:
                return proposal
            self._at_end = True
            self._quickest = self._quickest_of_best()
            slow = [i for i, each in enumerate(self._best) if self._quickest[i] is not each]
            self._left = [[at] for at in slow if len(slow) > 1] + ([slow] if slow else [])
        if not self._left:
            return None
        taken = self._left.pop()
        return [self._quickest[i] if i in taken else each for i, each in enumerate(self._best)]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """See TorchRec's ``Proposer.feedback``."""
        if not self._at_end:
            self._inner.feedback(partitionable, plan, perf_rating, storage_constraint)
        elif partitionable and plan == self._quickest:
            self._left = []  # there is room for all
        if partitionable and plan and perf_rating is not None and perf_rating < self._rating:
            self._best, self._rating = list(plan), perf_rating

    def _quickest_of_best(self) -> list[ShardingOption]:
        """Of the same tables and sharding types; the best plan's own where none is quicker."""
        alike: dict[tuple[str, str], list[QuickOption]] = defaultdict(list)
        for option in quick(self._options):
            alike[option.fqn, option.sharding_type].append(option)
        return [
            min((option, *alike[option.fqn, option.sharding_type]), key=slowest_shard)
            for option in quick(self._best)
        ]


class UntilOneFits(Proposer):
    """The proposals of several, in their order, up to the first that can be placed.

    There is one exactly where a planner that tries them all finds a plan.
    """

    def __init__(self, inner: Sequence[Proposer]) -> None:
        self._inner = list(inner)
        self._found = False

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """See TorchRec's ``Proposer.load``."""
        for proposer in self._inner:
            proposer.load(search_space, enumerator)

    def propose(self) -> list[ShardingOption] | None:
        """See TorchRec's ``Proposer.propose``."""
        while self._inner and not self._found:
            proposal: list[ShardingOption] | None = self._inner[0].propose()
            if proposal:
                return proposal
            self._inner.pop(0)
        return None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """See TorchRec's ``Proposer.feedback``."""
        self._found = partitionable
        self._inner[0].feedback(partitionable, plan, perf_rating, storage_constraint)
