"""Sparse sync: sums gradients of row copies over ranks, only for rows that a rank looked up.

If only one rank looked up a row, it sends the gradient to all other ranks. If several ranks did,
one of them, chosen round-robin, sums the gradients and sends the sum. With two ranks, both send all
their gradients. A touched row is a row that at least one rank looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import CommOp, QuantizedCommCodec, QuantizedCommCodecs

from recd_plugin_flexshard.runtime.split import nonzero
from recd_plugins.api import SetupError

_BITS = 8
_FORMATS = (torch.float32, torch.float16, torch.bfloat16)


class Wire:
    """Codecs for copied rows and their gradients, as in TorchRec's all-to-all of sequences.

    Args:
        codecs: TorchRec's ``qcomm_codecs_registry``; None sends float32.
        embedding_dim: scalars per row.
    """

    def __init__(self, codecs: dict[str, QuantizedCommCodecs] | None, embedding_dim: int) -> None:
        both = (codecs or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
        self.rows = Codec(None if both is None else both.forward, embedding_dim)
        self.gradients = Codec(None if both is None else both.backward, embedding_dim)


class Codec:
    """Encodes rows of ``embedding_dim`` scalars with a TorchRec codec. None does not encode.

    Raises:
        SetupError: a quantization block of the codec would span several rows.
    """

    def __init__(self, codec: QuantizedCommCodec[Any] | None, embedding_dim: int) -> None:
        self._codec = codec
        self._in_blocks = codec is not None and codec.quantized_dtype not in _FORMATS
        self._widths = embedding_dim, embedding_dim
        if codec is not None and self._in_blocks:
            context: Any = codec.create_context()
            if context.row_dim <= 0 or embedding_dim % context.row_dim:
                raise SetupError(
                    f"flexshard: embedding_dim is {embedding_dim}, but the codec of "
                    f"{CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name} ({codec.quantized_dtype}) "
                    f"quantizes blocks of {context.row_dim} scalars. Use a codec for fp32, fp16 or "
                    "bf16, or set training.wire."
                )
            self._widths = embedding_dim, codec.calc_quantized_size(embedding_dim, context)

    def encode(self, rows: Tensor) -> Tensor:
        """Encode float32 ``[n, embedding_dim]`` as ``[n, encoded_width]``."""
        if self._codec is None:
            return rows
        if not self._in_blocks:
            return self._codec.encode(rows)
        context = self._codec.create_context()
        return self._codec.encode(rows.reshape(-1), context).view(len(rows), self._widths[1])

    def decode(self, rows: Tensor) -> Tensor:
        """Decode ``[n, encoded_width]`` to float32 ``[n, embedding_dim]``."""
        if self._codec is None:
            return rows
        if not self._in_blocks:
            return self._codec.decode(rows)
        context: Any = self._codec.create_context()
        context.row_dim_quant = self._codec.calc_quantized_size(context.row_dim, context)
        return self._codec.decode(rows.reshape(-1), context).view(len(rows), self._widths[0])


#: Function (gradients ``[n, dim]``, positions ``[n]``, number of rows) to sums by position.
SumByPosition = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Hop:
    """Rows to send and receive in one all-to-all.

    ``send`` and ``receive`` are int64 indices in ``Routes.rows``, grouped by rank. The sizes are
    the numbers of rows per rank.
    """

    send: Tensor
    send_sizes: list[int]
    receive: Tensor
    receive_sizes: list[int]


@dataclass(frozen=True)
class Routes:
    """Communication plan of one sparse sync: which rows this rank sends, sums and receives.

    Attributes:
        rows: indices of the copies that any rank looked up, ascending, int64 ``[num_rows]``.
        mine: indices in ``rows`` of the rows that this rank looked up, ascending, int64.
        summed: indices in ``mine`` of the rows whose gradients this rank sums, int64.
        ends: for each range of copies, such as the copies of one table, the end of its part of
            ``rows``.
        gradients: all-to-all of gradients to the ranks that sum.
        sums: all-to-all of sums to the other ranks; None if every rank sums all its rows.
    """

    rows: Tensor
    mine: Tensor
    summed: Tensor
    ends: list[int]
    gradients: Hop
    sums: Hop | None


class TouchedRows:
    """Exchanges bitmaps of the row copies that each rank of a group looked up.

    The constructor is a collective call. It starts to send the bitmaps.

    Args:
        positions: indices of the copies that this rank looked up, int64 ``[n]``.
        ends: ascending ends of ranges of copies. The last one is the number of copies.
        group: process group of the ranks.
        codec: codec of gradients.
    """

    def __init__(
        self, positions: Tensor, ends: list[int], group: dist.ProcessGroup, codec: Codec
    ) -> None:
        size = -(-ends[-1] // _BITS) * _BITS
        self._ends, self._group, self._codec = ends, group, codec
        self._touched = torch.zeros(size, dtype=torch.bool, device=positions.device)
        self._touched.index_fill_(0, positions, True)
        # Kept alive while they are being sent.
        self._bits = _bits(positions.device)
        self._packed = (self._touched.view(-1, _BITS) * self._bits).sum(1, dtype=torch.uint8)
        self._all = self._packed.new_empty(group.size() * len(self._packed))
        self._work = dist.all_gather_into_tensor(
            self._all, self._packed, group=group, async_op=True
        )

    def start(self, gradients: Tensor, positions: Tensor, by_position: SumByPosition) -> SparseSum:
        """Start to sum gradients over the ranks.

        Args:
            gradients: this rank's gradients, float32 ``[n, dim]``.
            positions: index of the row copy of each gradient, int64 ``[n]``.
            by_position: function that sums gradients with equal positions.
        """
        places = self._touched.cumsum(0)[positions] - 1
        own = by_position(gradients, places, len(self.routes.mine))
        return SparseSum(self.routes, own, self._group, self._codec)

    def record_stream(self, stream: torch.Stream) -> None:
        """Call ``Tensor.record_stream`` for all tensors that the backward pass uses."""
        routes = self.routes
        tensors = [self._touched, routes.rows, routes.mine, routes.summed]
        for hop in (routes.gradients, routes.sums):
            tensors += [] if hop is None else [hop.send, hop.receive]
        for tensor in tensors:
            tensor.record_stream(stream)

    @cached_property
    def routes(self) -> Routes:
        """The communication plan of this sync. The first access waits twice for the device."""
        self._work.wait()
        rank, size = self._group.rank(), self._group.size()
        packed = self._all.view(size, -1, 1)
        bits = (packed & self._bits).ne(0).view(size, -1)
        anywhere = bits.any(0)
        ends: list[int] = torch.stack([anywhere[:end].sum() for end in self._ends]).tolist()
        rows = nonzero(anywhere, ends[-1])
        bits = bits.index_select(1, rows)
        turns = bits.cumsum(0, dtype=torch.int32)
        count = turns[-1]
        everywhere = (count == 1) | (size == 2)
        # Round-robin over the ranks that touched a row, so that all sum equally many rows.
        summing = (bits & (turns == rows % count + 1)) | everywhere
        send, receive = bits[rank] & summing, bits & summing[rank]
        passed = summing > everywhere  # summed by one of several ranks
        ways = torch.stack([send, receive, passed[rank].expand_as(passed), passed, bits, receive])
        ways &= _ranks_of_ways(rank, size, rows.device)
        counts: list[list[int]] = ways.sum(2).tolist()
        totals = list(map(sum, counts[:5]))
        *found, mine = torch.split(nonzero(ways[:5], sum(totals)), totals)
        return Routes(
            rows,
            mine,
            nonzero(summing[rank].index_select(0, mine), counts[5][rank]),
            ends,
            Hop(found[0], counts[0], found[1], counts[1]),
            Hop(found[2], counts[2], found[3], counts[3]) if totals[2] + totals[3] else None,
        )


@cache
def _bits(device: torch.device) -> Tensor:
    return torch.tensor([1 << bit for bit in range(_BITS)], dtype=torch.uint8, device=device)


@cache
def _ranks_of_ways(rank: int, size: int, device: torch.device) -> Tensor:
    """Return a mask ``[6, size, 1]``: the other ranks four times, and this rank twice."""
    own = torch.arange(size) == rank
    return torch.stack([~own] * 4 + [own] * 2).unsqueeze(2).to(device)


class SparseSum:
    """An asynchronous sum of gradients over ranks.

    ``own`` contains this rank's gradients for ``routes.mine``, float32 ``[len(mine), dim]``. All
    gradients are encoded and decoded before the sum, including this rank's own.
    """

    def __init__(self, routes: Routes, own: Tensor, group: dist.ProcessGroup, codec: Codec) -> None:
        self._routes, self._group, self._codec = routes, group, codec
        # Encoded once, because encoding decoded values again may change bits.
        encoded = codec.encode(own)
        self._own = codec.decode(encoded)
        # Indexed by row of the union, so that the same indexes select what is sent and received.
        of_union = encoded.new_zeros(len(routes.rows), encoded.shape[1])
        of_union.index_copy_(0, routes.mine, encoded)
        self._total = codec.decode(of_union)
        if len(routes.rows):
            gradients = of_union.index_select(0, routes.gradients.send)
            self._under_way = self._exchange(routes.gradients, gradients)

    def pass_on(self) -> None:
        """Sum received gradients in rank order and send the sums to the other ranks."""
        routes = self._routes
        if not len(routes.rows):
            return
        here = routes.mine.index_select(0, routes.summed)
        own = self._own.index_select(0, routes.summed)
        parts = list(zip(self._split(routes.gradients), self._arrived(), strict=True))
        self._total.zero_()
        for rank, (rows, gradients) in enumerate(parts):
            if rank == self._group.rank():
                rows, gradients = here, own
            self._total.index_add_(0, rows, gradients)
        if routes.sums is not None:
            passed_on = routes.sums.send
            sums = self._codec.encode(self._total.index_select(0, passed_on))
            self._total.index_copy_(0, passed_on, self._codec.decode(sums))
            self._under_way = self._exchange(routes.sums, sums)

    def result(self) -> Tensor:
        """Return the sums, float32 ``[num_rows, dim]``, bitwise equal on all ranks."""
        sums = self._routes.sums
        if sums is not None and len(self._routes.rows):
            for rows, gradients in zip(self._split(sums), self._arrived(), strict=True):
                self._total.index_copy_(0, rows, gradients)
        return self._total

    def _exchange(self, hop: Hop, values: Tensor) -> tuple[Tensor, Tensor, dist.Work, list[int]]:
        output = values.new_empty(len(hop.receive), values.shape[1])
        work = dist.all_to_all_single(
            output,
            values,
            hop.receive_sizes,
            hop.send_sizes,
            group=self._group,
            async_op=True,
        )
        assert work is not None
        return output, values, work, hop.receive_sizes

    def _arrived(self) -> tuple[Tensor, ...]:
        output, _, work, sizes = self._under_way
        work.wait()
        return torch.split(self._codec.decode(output), sizes)

    @staticmethod
    def _split(hop: Hop) -> tuple[Tensor, ...]:
        return torch.split(hop.receive, hop.receive_sizes)
