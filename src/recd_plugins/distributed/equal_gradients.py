"""Gradients of rows on their way to the tables, of which equal ones travel once.

Where a sequence is summed or averaged, all of its rows get the same gradient: rows that are in one
sequence of a batch alone have equal ones, bit for bit.
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
from torch.autograd.profiler import record_function
from torchrec.distributed.comm_ops import All2All_Seq_Req_Wait, Request
from torchrec.distributed.dist_data import SequenceEmbeddingsAllToAll

from recd_plugins.distributed.byte_counter import EXCHANGE_TAG
from recd_plugins.distributed.coalesced import kernels
from recd_plugins.distributed.process_groups import sends_by_gloo
from recd_plugins.distributed.rank_agreement import crosses_links
from recd_plugins.distributed.torchrec_internals import require_attributes

# A message begins with the number of its rows, in bytes that keep what follows aligned.
_ALIGNED = 8
# Of what rows take; else they go as they are, and are not compared for a while.
_WORTH = 0.9
_LONGEST_PAUSE = 64
_all_sent = False


class EqualGradientsOnce:
    """Sends gradients of sequences' rows, each of those to a rank that are equal once.

    A rank gets a number for each of its rows, in 16 bits where these suffice, and the distinct
    gradients, or all of them where that is less. Which it is, the message says: gloo receives what
    is shorter than it could be.

    Args:
        sequences: TorchRec's all-to-all of them, which sends rows as it did.
    """

    def __init__(self, sequences: SequenceEmbeddingsAllToAll) -> None:
        self._pause = self._to_wait = 0
        sequences.register_forward_hook(self._follow)

    def _follow(self, _module: nn.Module, _inputs: object, rows: Any) -> None:
        require_attributes(rows, "_tensor_awaitable")
        request = rows._tensor_awaitable
        if isinstance(request, Request):  # there is nothing to wait for on one rank
            request.wait_function = _RowsArrived
            request.equal_gradients = self

    def send(
        self, rows: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int], group: Any
    ) -> _Arriving:
        """What waits for the gradients of other ranks.

        Args:
            rows: ``[n, D]`` of floats, in the order of ranks.
            to_ranks: how many of them each rank gets.
            from_ranks: how many come from each.
            group: of the ranks.
        """
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


def send_equal_gradients_once(output_dists: Sequence[nn.Module]) -> bool:
    """Have output dists of sequences on CPU do so between nodes, where it is gloo that sends.

    Returns:
        Whether they do.
    """
    found = [
        module
        for each in output_dists
        for module in each.modules()
        if isinstance(module, SequenceEmbeddingsAllToAll)
    ]
    for module in found:
        require_attributes(module, "_pg")  # torchrec 1.6 to 1.9
    if not sends_once():
        return False
    if not all(sends_by_gloo(module._pg, "cpu") for module in found):
        return False
    for module in found:
        EqualGradientsOnce(module)
    return bool(found)


def sends_once() -> bool:
    """Whether modules that are sharded now do so; all ranks have to."""
    return crosses_links() and not _all_sent


def all_are_sent() -> bool:
    """Whether this is a context of ``all_gradients_sent``."""
    return _all_sent


@contextmanager
def all_gradients_sent() -> Iterator[None]:
    """A context in which modules are sharded that send gradients as TorchRec does.

    For what stands for TorchRec's own sharders in a comparison.
    """
    global _all_sent
    before, _all_sent = _all_sent, True
    try:
        yield
    finally:
        _all_sent = before


class _Message(NamedTuple):
    """One that is under way.

    Attributes:
        rows: it is of.
        bytes: of it, which gloo reads or writes until it is waited for.
        work: to wait for.
    """

    rows: Tensor
    bytes: Tensor
    work: Any


class _Arriving:
    """Gradients on their way, whose ``wait`` is that of a ``dist.Work``.

    Attributes:
        received: flat, once they are waited for.
    """

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
    """As TorchRec's, but for its backward pass; what waits for that takes both alike."""

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
            arriving = request.equal_gradients.send(
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
    """Where rows begin in a message that has numbers."""
    numbers = num_rows * np.dtype(_number_type(num_rows)).itemsize
    return _ALIGNED + -(-numbers // _ALIGNED) * _ALIGNED


def _message_size(num_rows: int, width: int) -> int:
    """Of the longest message, in bytes."""
    return _rows_at(num_rows) + num_rows * width


def _words(rows: Tensor) -> NDArray[Any]:
    """The bits of floats ``[n, D]``, as integers."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    return rows.view(word).numpy()


def _message(rows: Tensor, *, compares: bool) -> Tensor:
    """Bytes from which ``_read`` makes ``rows``."""
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
    kernels.gather(_words(sent), numbers, _words(rows), 0)
