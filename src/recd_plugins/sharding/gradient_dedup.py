"""Gradient deduplication for the backward all-to-all of sequence embeddings.

Sum and mean pooling give every row of a sequence the same gradient. Sending each distinct gradient
once per destination rank, with an index per row, saves most of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.distributed.comm_ops import All2All_Seq_Req_Wait, Request
from torchrec.distributed.dist_data import SequenceEmbeddingsAllToAll

from recd_plugins.compat.profiler_ranges import record_function
from recd_plugins.interfaces.step_cost import StageCosts
from recd_plugins.runtime.rank_agreement import crosses_links, sends_by_gloo
from recd_plugins.sharding.byte_counter import EXCHANGE_TAG
from recd_plugins.sharding.coalesced import kernels

# A message starts with its number of rows, padded so that the data behind it stays aligned.
_ALIGNED = 8
# If the message exceeds this share of all bytes, send all rows and skip comparisons for a while.
_WORTH = 0.9
_LONGEST_PAUSE = 64
# Seconds of compute per byte that deduplication saves, as much as a link of 1 Gbit/s needs.
_SECONDS_PER_BYTE = 1e-8
_all_sent = False


class DedupGradientAllToAll:
    """Backward all-to-all that sends each distinct gradient once per destination rank.

    The message to a rank contains the distinct gradients and one index per row, 16-bit if possible.
    If the full list of gradients is shorter, it is sent instead, and a flag in the message says so.
    If deduplication saves little in a step, up to 64 steps send all gradients without trying it.
    Messages may be shorter than the receive buffers, which gloo allows. The forward pass is that of
    TorchRec's all-to-all.
    """

    def __init__(self, sequences: SequenceEmbeddingsAllToAll) -> None:
        self._pause = self._to_wait = 0
        sequences.register_forward_hook(self._follow)

    def _follow(self, _module: nn.Module, _inputs: object, rows: Any) -> None:
        request = rows._tensor_awaitable
        if isinstance(request, Request):  # nothing to wait for on one rank
            request.wait_function = _RowsArrived
            request.gradient_dedup = self

    def send(
        self, rows: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int], group: Any
    ) -> _Arriving:
        """Send ``rows`` ``[n, D]``, ordered by destination rank. Return a handle with ``wait``."""
        own, width = group.rank(), rows.shape[1] * rows.element_size()
        received = rows.new_empty(sum(from_ranks), rows.shape[1])
        here = torch.split(received, list(from_ranks))
        arriving, leaving = [], []
        for rank, part in enumerate(here):
            if rank != own and len(part):
                message = torch.empty(_message_size(len(part), width), dtype=torch.uint8)
                work = dist.irecv(message, group=group, group_src=rank, tag=EXCHANGE_TAG)
                arriving.append(_Message(part, message, work))
        compares, compared, sent = self._to_wait == 0, 0, 0
        for rank, part in enumerate(torch.split(rows, list(to_ranks))):
            if rank != own and len(part):
                message = _message(part, compares=compares)
                compared += len(part) * width
                sent += len(message)
                work = dist.isend(message, group=group, group_dst=rank, tag=EXCHANGE_TAG)
                leaving.append(_Message(part, message, work))
            elif len(part):
                here[rank].copy_(part)
        if not compares:
            self._to_wait -= 1
        elif compared:
            gains = sent < _WORTH * compared
            self._pause = 0 if gains else min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._to_wait = self._pause
        return _Arriving(received.view(-1), arriving, leaving)


def dedup_gradients(output_dists: Sequence[nn.Module]) -> bool:
    """Deduplicate gradients if all dists use gloo across nodes; return True if any changed."""
    found = [
        module
        for each in output_dists
        for module in each.modules()
        if isinstance(module, SequenceEmbeddingsAllToAll)
    ]
    if not sends_once() or not all(sends_by_gloo(module._pg, "cpu") for module in found):
        return False
    for module in found:
        DedupGradientAllToAll(module)
    return bool(found)


def sends_once() -> bool:
    """Return True if the run has several nodes and gradient deduplication is not disabled."""
    return crosses_links() and not _all_sent


def gradient_dedup_pays(costs: StageCosts | None) -> bool:
    """Return True if gradient deduplication saves time with ``costs``, or if ``costs`` is None."""
    return costs is None or costs.all_to_all.bytes_across_nodes >= _SECONDS_PER_BYTE


@contextmanager
def all_gradients_sent() -> Iterator[None]:
    """Disable gradient deduplication for modules sharded in this context, for comparisons."""
    global _all_sent
    before, _all_sent = _all_sent, True
    try:
        yield
    finally:
        _all_sent = before


class _Message(NamedTuple):
    """A message in flight; gloo uses the buffer ``bytes`` until ``work`` is done."""

    rows: Tensor
    bytes: Tensor
    work: Any


class _Arriving:
    """Handle for gradients in flight, with ``wait`` as in ``dist.Work``."""

    def __init__(
        self, received: Tensor, arriving: Sequence[_Message], leaving: Sequence[_Message]
    ) -> None:
        self.received = received
        self._arriving, self._leaving = arriving, leaving

    def wait(self) -> None:
        for rows, message, work in self._arriving:
            work.wait()
            _read(message, rows)
        for _, _, work in self._leaving:
            work.wait()


class _RowsArrived(All2All_Seq_Req_Wait):
    """TorchRec's autograd function for received embeddings, with a deduplicating backward pass."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        request, info = ctx.myreq, ctx.a2ai
        codecs, dim = info.codecs, info.embedding_dim
        context = None
        if codecs is not None:
            if not codecs.backward.quantized_dtype.is_floating_point:  # rows have scales beside
                return All2All_Seq_Req_Wait.backward(ctx, *gradients)
            context = codecs.backward.create_context()
            gradient = codecs.backward.encode(gradient, context)
        with record_function("## All2All_Seq_bwd ##"):  # as TorchRec calls it
            arriving = request.gradient_dedup.send(
                gradient.view(-1, dim),
                [scalars // dim for scalars in info.output_splits],
                [scalars // dim for scalars in info.input_splits],
                ctx.pg,
            )
        request.req, request.tensor = arriving, arriving.received
        request.qcomm_ctx = context
        return None, None, request.dummy_tensor


def _number_type(num_rows: int) -> Any:
    return np.uint16 if num_rows <= 1 << 16 else np.uint32


def _rows_at(num_rows: int) -> int:
    """Return the byte offset of the gradients in a message that starts with indices."""
    numbers = num_rows * np.dtype(_number_type(num_rows)).itemsize
    return _ALIGNED + -(-numbers // _ALIGNED) * _ALIGNED


def _message_size(num_rows: int, width: int) -> int:
    """Return the size in bytes of the longest possible message for ``num_rows`` gradients."""
    return _rows_at(num_rows) + num_rows * width


def _words(rows: Tensor) -> NDArray[Any]:
    """Return a view of floats ``[n, D]`` as integers of the same width."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    return rows.view(word).numpy()


def _message(rows: Tensor, *, compares: bool) -> Tensor:
    """Serialize gradients ``[n, D]`` to bytes; with ``compares``, only distinct gradients."""
    rows = rows.detach().contiguous()
    count, width = len(rows), rows.shape[1] * rows.element_size()
    message = torch.empty(_message_size(count, width), dtype=torch.uint8)
    if compares:
        first = _rows_at(count)
        distinct = kernels.number_rows(
            _words(rows),
            np.empty(1 << (2 * count - 1).bit_length(), np.int32),
            message.numpy()[_ALIGNED:first].view(_number_type(count))[:count],
            _words(message[first:].view(rows.dtype).view(rows.shape)),
        )
        if first + distinct * width < _ALIGNED + count * width:
            message[:_ALIGNED].view(torch.int64).fill_(distinct)
            return message[: first + distinct * width]
    message[:_ALIGNED].view(torch.int64).fill_(count)
    message = message[: _ALIGNED + count * width]
    message[_ALIGNED:].view(rows.dtype).copy_(rows.view(-1))
    return message


def _read(message: Tensor, rows: Tensor) -> None:
    count, dim = rows.shape
    distinct = int(message[:_ALIGNED].view(torch.int64))
    first = _rows_at(count) if distinct < count else _ALIGNED
    end = first + distinct * dim * rows.element_size()
    sent = message[first:end].view(rows.dtype).view(distinct, dim)
    if distinct == count:
        rows.copy_(sent)
        return
    numbers = message.numpy()[_ALIGNED:first].view(_number_type(count))[:count]
    kernels.gather(_words(sent), numbers, _words(rows))
