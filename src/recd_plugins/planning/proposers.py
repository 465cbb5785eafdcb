"""The order in which TorchRec's planner tries plans, and when it stops."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology

# TorchRec tries every proposal, each of which places a shard of each table on each rank. From so
# many ranks on it is told to give up an order of trying after so many plans that are no better.
_MANY_RANKS = 64
_PATIENCE = 32
_HASTE = 8


def proposers(world_size: int) -> list[Proposer]:
    """TorchRec's own, with less patience on many ranks; always the same ones for as many."""
    if world_size <= _MANY_RANKS:
        return [
            GridSearchProposer(),
            GreedyProposer(),
            GreedyProposer(use_depth=False),
            UniformProposer(),
        ]
    return [
        GreedyProposer(threshold=_PATIENCE),
        GreedyProposer(use_depth=False, threshold=_PATIENCE),
        UniformProposer(),
    ]


def few_proposers() -> list[Proposer]:
    """Those that find a plan near the best one soon, for who compares many plans."""
    return [GreedyProposer(use_depth=False, threshold=_HASTE), UniformProposer()]


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
