"""Overlaps communication with compute in train pipelines.

``LookupAhead`` looks up rows for the next step. ``DeferredAllReduce`` reduces dense gradients while
the tables are updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.compat.lookup_kernels import counting, step_counts
from recd_plugins.runtime.rank_agreement import new_group, ranks_of_each_node


class LookupAhead:
    """Wraps the lookup of fused kernels to look up rows of the next step early.

    FBGEMM's backward pass uses the learning rate of the forward pass. If the learning rate changes
    after the lookup, the rows are looked up again before the backward pass. FBGEMM's step count
    increases only in the backward pass, because a checkpoint may be written after the lookup.
    """

    def __init__(self, lookup: nn.Module) -> None:
        self._lookup = lookup
        parts: list[Any] = list(lookup.modules())
        self._kernels = [each for each in parts if hasattr(each, "learning_rate_tensor")]
        self._counting = counting(parts)

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the embedding rows of ``features``."""
        self._features, self._rates = features, self._rates_now()
        before = [count.clone() for count in step_counts(self._counting)]
        self._rows = rows = self._lookup(features)
        counts = step_counts(self._counting)
        self._counted = [now - then for now, then in zip(counts, before, strict=True)]
        if not rows.requires_grad:
            return rows
        self._count(-1)
        ahead: Tensor = _Learning.apply(rows.detach().requires_grad_(), self)  # type: ignore[no-untyped-call]
        return ahead

    def learn(self, gradients: Tensor) -> None:
        """Update the tables with ``gradients`` of the looked-up rows."""
        if self._rates_now() == self._rates:
            self._count(1)
        else:  # the lookup counts a step too
            with torch.enable_grad():
                self._rows = self._lookup(self._features)
        self._rows.backward(gradients)

    def _rates_now(self) -> list[float]:
        return [float(kernel.learning_rate_tensor) for kernel in self._kernels]

    def _count(self, sign: int) -> None:
        for count, counted in zip(step_counts(self._counting), self._counted, strict=True):
            count.add_(counted, alpha=sign)


class _Learning(torch.autograd.Function):
    """Identity function whose backward pass updates the tables."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ahead: LookupAhead) -> Tensor:
        ctx.ahead = ahead
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.ahead.learn(*gradients)
        return None, None


class DeferredAllReduce:
    """Defers the gradient all-reduce of DistributedDataParallel until ``start`` is called.

    On one node, or with one rank per node, gradients are bit-identical to those without deferral.
    Otherwise, they are summed within each node first, which may change the last bits.
    Outside the ``later`` context, buckets are reduced immediately.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        # Has its own threads and order, so other collectives do not wait for it.
        self._group = new_group(ranks)
        self._hops = _hops(ranks)
        self._followed: WeakSet[nn.Module] = WeakSet()
        self._is_late = False
        self._ready: list[_Sum] = []
        self._under_way: list[_Sum] = []

    @classmethod
    def of(cls, wrapped: DistributedDataParallel) -> DeferredAllReduce | None:
        """Return the ``DeferredAllReduce`` of ``wrapped``, and create it at the first call.

        All ranks must make the first call together. Return None if ``wrapped`` has a communication
        hook, or if its process group does not contain all ranks.
        """
        if wrapped.process_group.size() != dist.get_world_size():
            return None
        if wrapped not in _DEFERRED:
            deferred = cls(wrapped.process_group)
            hooks = list(wrapped._comm_hooks)
            try:
                # Not the method: torch compares annotations, which are strings here.
                wrapped.register_comm_hook(deferred, lambda own, bucket: own.summed(bucket))
            except RuntimeError:  # a communication hook exists, and DDP allows only one
                wrapped._comm_hooks = hooks
                return None
            _DEFERRED[wrapped] = deferred
        return _DEFERRED[wrapped]

    @contextmanager
    def later(self) -> Iterator[None]:
        """Defer the all-reduce in this context until ``start``; wait for all buckets at the end."""
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
        """Launch the all-reduce of the ready buckets, in bucket order."""
        for each in self._ready:
            each.start()
        self._under_way += self._ready
        self._ready.clear()

    def start_after(self, lookup: nn.Module) -> None:
        """Call ``start`` when the gradients of ``lookup`` have arrived and links are idle."""
        if lookup in self._followed:  # set by an earlier pipeline
            return
        self._followed.add(lookup)

        def follow(_module: nn.Module, _ids: object, rows: Tensor) -> Tensor:
            if rows.requires_grad:
                # A rank without tables returns the same empty tensor in each step, which would
                # keep the hook.
                rows = rows.view_as(rows) if rows.is_leaf else rows
                rows.register_hook(lambda _: self.start())  # type: ignore[no-untyped-call]
            return rows

        lookup.register_forward_hook(follow)

    def summed(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Return the future that DistributedDataParallel waits for; a finished one if deferred."""
        gradients: Tensor = bucket.buffer()
        gradients.mul_(1.0 / self._group.size())  # as DistributedDataParallel does
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
    """Process groups of this node's ranks, and of each node's first rank (None on other ranks)."""

    node: dist.ProcessGroup
    first: int
    across: dist.ProcessGroup | None


def _hops(ranks: Sequence[int]) -> _Hops | None:
    """Create groups for a two-level all-reduce; None for one node or one rank per node."""
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
    """Asynchronous in-place all-reduce; with ``hops``, it sums within each node first."""

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


_DEFERRED: WeakKeyDictionary[DistributedDataParallel, DeferredAllReduce] = WeakKeyDictionary()
