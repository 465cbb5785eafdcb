"""Ids of all modules of a batch, which travel in one all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding_sharding import (
    FusedKJTListSplitsAwaitable,
    KJTListAwaitable,
    KJTSplitsAllToAllMeta,
)
from torchrec.distributed.types import Awaitable

from recd_plugins.distributed.torchrec_internals import require_attributes

# What lengths and ids are, and what they are sent as.
_INTEGERS, _WORD = (torch.int32, torch.int64), torch.int32


class JoinedIds(Awaitable[list[KJTListAwaitable]]):
    """Lengths and ids of modules, which leave in one all-to-all when their sizes have come.

    TorchRec (1.6 to 1.9) sends each tensor of each module in a collective of its own. In gloo one
    of few bytes takes as long as one of many. Features with weights are left to TorchRec.

    Args:
        sizes: of the ids of modules on one process group; this is waited for in place of it.
    """

    def __init__(self, sizes: FusedKJTListSplitsAwaitable[Any]) -> None:
        super().__init__()
        require_attributes(sizes, "_awaitables")
        self._sizes = sizes

    def _wait_impl(self) -> list[KJTListAwaitable]:
        asked: list[Any] = self._sizes._awaitables
        joined = [number for number, each in enumerate(asked) if _is_joined(each)]
        sent = [asked[number].input_tensors for number in joined]
        for number in joined:
            asked[number].input_tensors = []  # TorchRec sends none of it
        requests = self._sizes.wait()
        arriving = [each for request in requests for each in request.awaitables]
        if joined:
            _send([asked[n] for n in joined], [arriving[n] for n in joined], sent)
        return requests


def _is_joined(asked: object) -> bool:
    return (
        isinstance(asked, KJTSplitsAllToAllMeta)
        and asked.pg.size() > 1
        and all(tensor.dtype in _INTEGERS for tensor in asked.input_tensors)
    )


def _send(
    asked: Sequence[KJTSplitsAllToAllMeta],
    arriving: Sequence[KJTAllToAllTensorsAwaitable],
    sent: Sequence[Sequence[Tensor]],
) -> None:
    """Have ``arriving`` wait for an all-to-all of what they would have sent."""
    every: list[_Tensor] = []
    for meta, awaitable, tensors in zip(asked, arriving, sent, strict=True):
        require_attributes(awaitable, "_output_splits", "_output_tensors", "_awaitables")
        from_ranks = [awaitable._output_splits[label] for label in meta.labels]
        own = [_Tensor(*each) for each in zip(tensors, meta.input_splits, from_ranks, strict=True)]
        awaitable._output_tensors.extend(tensor.received for tensor in own)
        every += own
    work: Any = _Together(asked[0].pg, every)
    for awaitable in arriving:
        awaitable._awaitables.append(work)


class _Tensor:
    """One of those that travel together.

    Args:
        sent: one-dimensional.
        to_ranks: how much of it each rank gets.
        from_ranks: how much comes from each.

    Attributes:
        received: what comes, in the order of ranks.
        parts: words for each rank.
        from_ranks: how many words come from each.
    """

    def __init__(self, sent: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> None:
        self.received = sent.new_empty(sum(from_ranks))
        words = sent.element_size() // _WORD.itemsize
        self.parts = torch.split(sent.contiguous().view(_WORD), [words * n for n in to_ranks])
        self.from_ranks = [words * n for n in from_ranks]


class _Together:
    """One all-to-all of several tensors, whose ``wait`` is that of a ``dist.Work``.

    Args:
        group: of the ranks.
        tensors: one or more.
    """

    def __init__(self, group: dist.ProcessGroup, tensors: Sequence[_Tensor]) -> None:
        to_ranks = list(zip(*(tensor.parts for tensor in tensors), strict=True))
        from_ranks = list(zip(*(tensor.from_ranks for tensor in tensors), strict=True))
        self._sent = torch.cat(list(chain.from_iterable(to_ranks)))
        self._sizes = list(chain.from_iterable(from_ranks))
        self._arrived = self._sent.new_empty(sum(self._sizes))
        self._missing = [tensor.received for tensor in tensors]
        self._work = dist.all_to_all_single(
            self._arrived,
            self._sent,
            output_split_sizes=[sum(sizes) for sizes in from_ranks],
            input_split_sizes=[sum(map(len, parts)) for parts in to_ranks],
            group=group,
            async_op=True,
        )

    def wait(self) -> None:
        """Have them received; whoever waits again finds that done."""
        assert self._work is not None, "asynchronous"
        self._work.wait()
        parts = torch.split(self._arrived, self._sizes)
        for number, tensor in enumerate(self._missing):
            torch.cat(parts[number :: len(self._missing)], out=tensor.view(_WORD))
        self._missing = []
