"""Gradients of dense layers, summed over ranks while these do something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class LateGradients:
    """Sums of a DistributedDataParallel's gradients that its backward pass does not wait for.

    The buckets and the order in which ranks are summed stay DistributedDataParallel's, so that the
    gradients are the same bit for bit. Outside of ``later`` it sums as it did.

    Args:
        group: that sums.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Its own threads and its own order: what else ranks send does not wait for it.
        self._group = dist.new_group(dist.get_process_group_ranks(group))
        self._is_late = False
        self._ready: list[Tensor] = []
        self._under_way: list[dist.Work] = []

    @classmethod
    def of(cls, wrapped: DistributedDataParallel) -> LateGradients:
        """That of ``wrapped``, which has one from the first call on. A collective call."""
        if wrapped not in _LATE:
            _LATE[wrapped] = late = cls(wrapped.process_group)
            # Not the method: torch compares annotations, which are strings here.
            wrapped.register_comm_hook(late, lambda late, bucket: late.summed(bucket))
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
        self._under_way += [
            dist.all_reduce(each, group=self._group, async_op=True) for each in self._ready
        ]
        self._ready.clear()

    def start_after(self, lookup: nn.Module) -> None:
        """Start when gradients of its rows have come: links are free while tables learn."""

        def follow(_module: nn.Module, _ids: object, rows: Tensor) -> None:
            if rows.requires_grad:
                rows.register_hook(lambda _: self.start())  # type: ignore[no-untyped-call]

        lookup.register_forward_hook(follow)

    def summed(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """What DistributedDataParallel gets for a bucket: at once where it is summed later."""
        gradients: Tensor = bucket.buffer()
        gradients.mul_(1.0 / self._group.size())  # as it does itself, in these words
        if not self._is_late:
            work = dist.all_reduce(gradients, group=self._group, async_op=True)
            assert work is not None
            return work.get_future().then(lambda done: done.value()[0])
        self._ready.append(gradients)
        unsummed: torch.futures.Future[Tensor] = torch.futures.Future()
        unsummed.set_result(gradients)
        return unsummed


_LATE: WeakKeyDictionary[DistributedDataParallel, LateGradients] = WeakKeyDictionary()
