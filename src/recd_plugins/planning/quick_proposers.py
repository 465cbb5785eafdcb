"""TorchRec's proposers, of tables that have shards on many ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology

from recd_plugins.planning.quick_option import QuickOption, quick

_NOTHING = (0, 0, 0, 0)


def slowest_shard(option: QuickOption) -> float:
    """Milliseconds of the shard of a table that takes the longest."""
    return float(option.loads.milliseconds.max())


def every_shard(option: QuickOption) -> float:
    """Milliseconds of all shards of a table, added up in their order."""
    return sum(option.loads.milliseconds.tolist())


class Greedy(Proposer):
    """The quickest option of each table, and slower ones of whatever table takes the most memory.

    The same proposals as of TorchRec's ``GreedyProposer``, which adds up what every shard of
    every table takes for each of them: of 1,024 ranks that is a tenth of all planning.

    Args:
        milliseconds: what options of a table are ordered by.
        patience: how many plans, one after the other, may be no better than the best; None for
            all there are.
    """

    def __init__(
        self, milliseconds: Callable[[QuickOption], float], *, patience: int | None = None
    ) -> None:
        self._milliseconds, self._patience = milliseconds, patience
        # By table, options that are left, the quickest last.
        self._left: dict[str, list[QuickOption]] = {}
        self._best, self._worse = float("inf"), 0

    def load(
        self,
        search_space: list[ShardingOption],
        enumerator: Enumerator | None = None,  # noqa: ARG002
    ) -> None:
        """See TorchRec's ``Proposer.load``."""
        options: dict[str, list[QuickOption]] = defaultdict(list)
        for option in quick(search_space):
            options[option.fqn].append(option)
        self._left = {
            # The quickest last, and of equally quick ones the first.
            table: sorted(each, key=self._milliseconds)[::-1]
            for table, each in options.items()
        }
        self._best, self._worse = float("inf"), 0

    def propose(self) -> list[ShardingOption] | None:
        """See TorchRec's ``Proposer.propose``."""
        return [options[-1] for options in self._left.values()] or None

    def feedback(
        self,
        partitionable: bool,  # noqa: ARG002
        plan: list[ShardingOption] | None = None,  # noqa: ARG002
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,  # noqa: ARG002
    ) -> None:
        """See TorchRec's ``Proposer.feedback``."""
        if self._patience and perf_rating:
            self._worse = 0 if perf_rating < self._best else self._worse + 1
            self._best = min(self._best, perf_rating)
            if self._worse > self._patience:
                self._left = {}
        largest, most = None, _NOTHING
        for options in self._left.values():
            if len(options) > 1 and options[-1].loads.memory > most:
                largest, most = options, options[-1].loads.memory
        if largest is None:
            self._left = {}
        else:
            largest.pop()


class Uniform(Proposer):
    """The quickest options of one sharding type, for each that every table may have.

    The same proposals as of TorchRec's ``UniformProposer``, which looks at every shard.
    """

    def __init__(self) -> None:
        self._left: list[list[ShardingOption]] = []

    def load(
        self,
        search_space: list[ShardingOption],
        enumerator: Enumerator | None = None,  # noqa: ARG002
    ) -> None:
        """See TorchRec's ``Proposer.load``."""
        tables = {option.fqn for option in search_space}
        by_type: dict[str, dict[str, QuickOption]] = defaultdict(dict)
        for option in quick(search_space):
            quickest = by_type[option.sharding_type]
            other = quickest.setdefault(option.fqn, option)
            if slowest_shard(option) < slowest_shard(other):
                quickest[option.fqn] = option
        every = [[*each.values()] for each in by_type.values() if each.keys() == tables]
        self._left = [*reversed(every)]

    def propose(self) -> list[ShardingOption] | None:
        """See TorchRec's ``Proposer.propose``."""
        return self._left[-1] if self._left else None

    def feedback(
        self,
        partitionable: bool,  # noqa: ARG002
        plan: list[ShardingOption] | None = None,  # noqa: ARG002
        perf_rating: float | None = None,  # noqa: ARG002
        storage_constraint: Topology | None = None,  # noqa: ARG002
    ) -> None:
        """See TorchRec's ``Proposer.feedback``."""
        self._left.pop()
