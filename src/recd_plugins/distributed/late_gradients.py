"""Gradients of dense layers, summed over ranks while these do something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recd_plugins.distributed.process_groups import new_group
from recd_plugins.distributed.rank_agreement import ranks_of_each_node


class LateGradients:
    """Sums of a DistributedDataParallel's gradients that its backward pass does not wait for.

    The buckets and the order in which ranks are summed stay DistributedDataParallel's, so that the
    gradients are the same bit for bit; but of several nodes with several ranks each, whose ranks
    are summed first. Outside of ``later`` it sums as it did.

    Args:
        group: that sums.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        # Its own threads and its own order: what else ranks send does not wait for it.
        self._group = new_group(ranks)
        self._hops = _hops(ranks)
        self._followed: WeakSet[nn.Module] = WeakSet()
        self._is_late = False
        self._ready: list[_Sum] = []
        self._under_way: list[_Sum] = []

    @classmethod
    def of(cls, wrapped: DistributedDataParallel) -> LateGradients | None:
        """That of ``wrapped``, which has one from the first call on. A collective call.

        None where a trainer has given it a hook of its own, which sums as it likes, and of some of
        the ranks alone: the others would have to make its groups, too.
        """
        if wrapped.process_group.size() != dist.get_world_size():
            return None
        if wrapped not in _LATE:
            late = cls(wrapped.process_group)
            hooks = list(wrapped._comm_hooks)
            try:
                # Not the method: torch compares annotations, which are strings here.
                wrapped.register_comm_hook(late, lambda late, bucket: late.summed(bucket))
            except RuntimeError:  # there is one, and there can be no other
                wrapped._comm_hooks = hooks
                return None
            _LATE[wrapped] = late
        return _LATE[wrapped]

    @contextmanager
    def later(self) -> Iterator[None]:
        """A context for a backward pass; at its end the gradients are there.

        In it they are summed from the first ``start`` on.
        """
        self._ready.clear()
        self._under_way.clear()
        self._is_late = True
        try:
            yield
            self.start()
            for each in self._under_way:
                each.wait()
        finally:
            self._is_late = False

    def start(self) -> None:
        """Sum what is ready: buckets in their order, whenever a rank comes here."""
        for each in self._ready:
            each.start()
        self._under_way += self._ready
        self._ready.clear()

    def start_after(self, lookup: nn.Module) -> None:
        """Start when gradients of its rows have come: links are free while tables learn."""
        if lookup in self._followed:  # by a pipeline before
            return
        self._followed.add(lookup)

        def follow(_module: nn.Module, _ids: object, rows: Tensor) -> Tensor:
            if rows.requires_grad:
                # A rank without tables is given the same empty tensor in each step: a hook of it
                # would stay.
                rows = rows.view_as(rows) if rows.is_leaf else rows
                rows.register_hook(lambda _: self.start())  # type: ignore[no-untyped-call]
            return rows

        lookup.register_forward_hook(follow)

    def summed(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """What DistributedDataParallel gets for a bucket: at once where it is summed later."""
        gradients: Tensor = bucket.buffer()
        gradients.mul_(1.0 / self._group.size())  # as it does itself, in these words
        if not self._is_late:
            work = dist.all_reduce(gradients, group=self._group, async_op=True)
            assert work is not None
            return work.get_future().then(lambda done: done.value()[0])
        self._ready.append(_Sum(gradients, self._group, self._hops))
        unsummed: torch.futures.Future[Tensor] = torch.futures.Future()
        unsummed.set_result(gradients)
        return unsummed


@dataclass(frozen=True)
class _Hops:
    """Ranks of a node, and the first of each node: links carry what these send alone.

    Attributes:
        node: of this rank.
        first: rank of the node that is in ``across``.
        across: None for the others.
    """

    node: dist.ProcessGroup
    first: int
    across: dist.ProcessGroup | None


def _hops(ranks: Sequence[int]) -> _Hops | None:
    """None where all ranks are on one node, or each on its own. A collective call."""
    size = ranks_of_each_node()
    if size in (1, len(ranks)) or len(ranks) != dist.get_world_size():
        return None
    nodes = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    groups = [new_group(node) for node in nodes]
    across = new_group([node[0] for node in nodes])
    node = dist.get_rank() // size
    first = nodes[node][0]
    return _Hops(groups[node], first, across if dist.get_rank() == first else None)


class _Sum:
    """Gradients that are summed over ranks in place.

    With ``hops`` the ranks of a node are summed from here on, and links carry them from ``start``.
    """

    def __init__(self, gradients: Tensor, group: dist.ProcessGroup, hops: _Hops | None) -> None:
        self._gradients, self._hops = gradients, hops
        self._group = group if hops is None else hops.across
        self._work: dist.Work | None = None
        if hops is not None:
            self._work = dist.reduce(gradients, hops.first, group=hops.node, async_op=True)

    def start(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._group is not None:
            self._work = dist.all_reduce(self._gradients, group=self._group, async_op=True)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        if self._hops is not None:
            dist.broadcast(self._gradients, self._hops.first, group=self._hops.node)


_LATE: WeakKeyDictionary[DistributedDataParallel, LateGradients] = WeakKeyDictionary()
