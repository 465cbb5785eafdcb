"""Attention within rows of different lengths, on values without padding.

A row of length L costs L^2, so padding a batch to its longest row is expensive. Rows are therefore
sorted by length and divided into buckets, each padded to its longest row. A bucket grows while its
padding costs less than another attention call (``_CALL``). Several features share buckets, which
reduces padding. Torch's jagged nested tensors are 3 to 5 times slower on CPU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.api import jagged

# Costs of a value and of a call, in units of squared length. Not measured on CUDA.
_VALUE = 10
_CALL = {"cpu": 16_000}
_CALL_ELSEWHERE = 2_000_000
# Maximum grid size of the CUDA kernels, which have one block per row.
_MOST_ROWS = 65_535


@dataclass(frozen=True)
class _Bucket:
    """Rows of similar length, padded to the longest row. ``lengths`` is None without padding."""

    num_rows: int
    longest: int
    lengths: Tensor | None

    @property
    def num_places(self) -> int:
        return self.num_rows * self.longest

    def valid(self) -> Tensor | None:
        """Return the attention mask, bool ``[num_rows, 1, 1, longest]``. None without padding."""
        if self.lengths is None:
            return None
        position = torch.arange(self.longest, device=self.lengths.device)
        # An empty row attends to one value, because attending to none would give NaN.
        return (position < self.lengths.clamp(min=1).unsqueeze(1))[:, None, None, :]


class JaggedRows:
    """Computes attention within each of R rows of one or more features."""

    def __init__(self, sequences: Sequence[JaggedTensor]) -> None:
        self.num_rows = [sequence.lengths().numel() for sequence in sequences]
        self.num_values = [sequence.values().shape[0] for sequence in sequences]
        self.lengths = torch.cat([sequence.lengths() for sequence in sequences]).long()
        self._buckets: list[_Bucket] = []
        self._order: Tensor | None = None
        self._places: Tensor | None = None
        if sum(self.num_values) == 0:
            return
        ordered, order = self.lengths.sort(stable=True)
        self._buckets = _cut(ordered)
        if len(self._buckets) > 1:
            self._order = order
        elif self._buckets[0].lengths is None:
            return
        else:
            self._buckets = [replace(self._buckets[0], lengths=self.lengths)]
        self._lay_out()

    def _lay_out(self) -> None:
        """Compute the indices that map values to padded positions, and back."""
        widths = torch.tensor([bucket.longest for bucket in self._buckets])
        repeats = torch.tensor([bucket.num_rows for bucket in self._buckets])
        of_rows = widths.repeat_interleave(repeats).to(self.lengths.device)
        starts = jagged.offsets_of(self.lengths)[:-1]
        places = jagged.offsets_of(of_rows)[:-1]
        if self._order is None:
            padded_starts = places
        else:
            padded_starts = torch.zeros_like(starts).index_copy_(0, self._order, places)
            starts = starts.index_select(0, self._order)
        total, num_places = sum(self.num_values), int((widths * repeats).sum())
        # Padding does not count: it is masked, and its gradients are zero.
        values = jagged.positions_of_ranges(starts, of_rows, num_places)
        self._values = values.clamp_(max=total - 1)
        self._places = jagged.positions_of_ranges(padded_starts, self.lengths, total)

    def self_attention(self, query_key_value: Tensor, heads: int) -> Tensor:
        """Compute multi-head self-attention within each row.

        Maps queries, keys and values side by side, ``[num_values, 3 * D]``, to ``[num_values, D]``.
        """
        dim = query_key_value.shape[1] // 3
        if not self._buckets:
            return query_key_value[:, :dim]
        attended = []
        for bucket, places in zip(self._buckets, self._padded(query_key_value), strict=True):
            shape = (bucket.num_rows, bucket.longest, 3, heads, dim // heads)
            # Unbound first, so that the gradients of the three meet in the layout of places.
            query, key, value = (each.transpose(1, 2) for each in places.view(shape).unbind(2))
            outputs = F.scaled_dot_product_attention(query, key, value, attn_mask=bucket.valid())
            attended.append(outputs.transpose(1, 2).reshape(bucket.num_places, dim))
        if self._places is None:
            return attended[0]
        collected: Tensor = _Collect.apply(torch.cat(attended), self._places)  # type: ignore[no-untyped-call]
        return collected

    def weighted_sums(
        self,
        queries: Tensor,
        values: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    ) -> Tensor:
        """Call ``attend`` with the queries and the padded values of each bucket of rows.

        Args:
            queries: ``[R, num_queries, D]``.
            values: ``[num_values, D]``, used as keys and as values.
            attend: function of queries ``[n, num_queries, D]``, padded values ``[n, L, D]`` and a
                mask of valid values, bool ``[n, 1, L]`` or None. Returns ``[n, num_queries, D]``.

        Returns:
            ``[R, num_queries, D]``. Empty rows have undefined but finite values.
        """
        if not self._buckets:
            return queries + values.sum()
        if self._order is not None:
            queries = queries.index_select(0, self._order)
        sums = []
        of_buckets = torch.split(queries, [bucket.num_rows for bucket in self._buckets])
        for bucket, asked, places in zip(
            self._buckets, of_buckets, self._padded(values), strict=True
        ):
            valid = bucket.valid()
            padded = places.view(bucket.num_rows, bucket.longest, values.shape[1])
            sums.append(attend(asked, padded, None if valid is None else valid[:, 0]))
        if self._order is None:
            return sums[0]
        return torch.cat(sums).index_select(0, self._order.argsort())

    def zero_where_empty(self, pooled: Sequence[Tensor]) -> list[Tensor]:
        """Return ``pooled``, one ``[num_rows, D]`` per feature, with zeros for empty rows."""
        filled = torch.split((self.lengths > 0).unsqueeze(1), self.num_rows)
        return [vectors * mask for vectors, mask in zip(pooled, filled, strict=True)]

    def _padded(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return the padded values of each bucket, ``[num_rows * longest, D]``."""
        if self._places is None:
            return (values,)
        padded: Tensor = _Spread.apply(values, self._values, self._places)  # type: ignore[no-untyped-call]
        return torch.split(padded, [bucket.num_places for bucket in self._buckets])


def pool_bags(values: Tensor, lengths: Tensor, mode: str) -> Tensor:
    """Reduce the values of each row by ``sum``, ``mean`` or ``max``.

    Args:
        values: ``[num_values, D]``.
        lengths: number of values of each row, int ``[R]``.
        mode: ``sum``, ``mean`` or ``max``.

    Returns:
        ``[R, D]``, with zeros for empty rows.
    """
    lengths = lengths.long()
    if mode == "max":
        return _bags(values, lengths, mode)
    pooled: Tensor = _SumOrMean.apply(values, lengths, mode)  # type: ignore[no-untyped-call]
    return pooled


def _bags(values: Tensor, lengths: Tensor, mode: str) -> Tensor:
    # The fastest CPU forward of torch and FBGEMM for all sizes.
    positions = torch.arange(values.shape[0], device=values.device)
    return F.embedding_bag(positions, values, jagged.offsets_of(lengths)[:-1], mode=mode)


class _SumOrMean(torch.autograd.Function):
    """Sums or averages adjacent values. Faster than ``F.embedding_bag``, whose backward sorts."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor, mode: str) -> Tensor:
        ctx.save_for_backward(lengths)
        ctx.num_values, ctx.mode = values.shape[0], mode
        return _bags(values, lengths, mode)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (lengths,) = ctx.saved_tensors
        if ctx.mode == "mean":
            gradient = gradient / lengths.clamp(min=1).unsqueeze(1)
        rows = torch.repeat_interleave(lengths, output_size=ctx.num_values)
        return gradient.index_select(0, rows), None, None


def _cut(ordered: Tensor) -> list[_Bucket]:
    """Divide rows, sorted by length, into buckets. Empty rows join the shortest rows."""
    lengths = ordered.tolist()
    call = _CALL.get(ordered.device.type, _CALL_ELSEWHERE)
    buckets = []
    start = 0
    while start < len(lengths):
        longest, padding = max(lengths[start], 1), 0
        end = bisect_right(lengths, longest, lo=start)
        while end < len(lengths):
            padding += (end - start) * (_cost(lengths[end]) - _cost(longest))
            if padding > call:
                break
            longest = lengths[end]
            end = bisect_right(lengths, longest, lo=end)
        end = min(end, start + _MOST_ROWS)
        longest = max(lengths[end - 1], 1)
        alike = lengths[start] == longest
        buckets.append(_Bucket(end - start, longest, None if alike else ordered[start:end]))
        start = end
    return buckets


def _cost(length: int) -> int:
    return length * (length + _VALUE)


class _Spread(torch.autograd.Function):
    """Copies values to padded positions. Its backward ignores the gradients of padding."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, taken: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return values.index_select(0, taken)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None


class _Collect(torch.autograd.Function):
    """Copies values from padded positions back, which undoes ``_Spread``."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_places = padded.shape[0]
        return padded.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        padded = gradient.new_zeros(ctx.num_places, gradient.shape[1])
        return padded.index_copy_(0, places, gradient), None


class TracedRows(JaggedRows):
    """``JaggedRows`` for TorchScript and ``torch.export``: its code does not depend on lengths.

    Pads all rows to the longest row. With ``inverse``, int64 ``[B]``, ``weighted_sums`` accepts B
    targets and uses row ``inverse[i]`` for target i. Other methods do not support ``inverse``.
    """

    def __init__(self, sequences: Sequence[JaggedTensor], inverse: Tensor | None = None) -> None:
        self.num_values = [sequence.values().shape[0] for sequence in sequences]
        lengths = [sequence.lengths().long() for sequence in sequences]
        all_lengths = torch.cat(lengths)
        starts = all_lengths.cumsum(0) - all_lengths
        if inverse is not None:
            firsts = [sum(each.shape[0] for each in lengths[:n]) for n in range(len(lengths))]
            rows = torch.cat([inverse + first for first in firsts])
            all_lengths, starts = all_lengths.index_select(0, rows), starts.index_select(0, rows)
            self.num_rows = [inverse.shape[0]] * len(lengths)
        else:
            self.num_rows = [each.shape[0] for each in lengths]
        self.lengths, self._starts = all_lengths, starts
        # Two places at least: torch asks whether a size is 1, and there may be no row or no value.
        longest: Any = F.pad(all_lengths, (0, 1), value=2).max().item()  # an int, or a SymInt
        torch._check(longest >= 2)  # type: ignore[no-untyped-call]
        self._longest = longest
        position = torch.arange(longest, device=starts.device)
        inside = position < all_lengths.unsqueeze(1)
        # Padding reads the extra value behind the last value.
        self._taken = torch.where(inside, starts.unsqueeze(1) + position, sum(self.num_values))
        self._valid = position < all_lengths.clamp(min=1).unsqueeze(1)

    def self_attention(self, query_key_value: Tensor, heads: int) -> Tensor:
        dim = query_key_value.shape[1] // 3
        places = self._places_of(query_key_value).view(-1, self._longest, 3, heads, dim // heads)
        query, key, value = (each.transpose(1, 2) for each in places.unbind(2))
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=self._valid[:, None, None, :]
        )
        row = torch.repeat_interleave(self.lengths, output_size=query_key_value.shape[0])
        nth = torch.arange(row.shape[0], device=row.device) - self._starts.index_select(0, row)
        flat = attended.transpose(1, 2).reshape(-1, dim)
        return flat.index_select(0, row * self._longest + nth)

    def weighted_sums(
        self,
        queries: Tensor,
        values: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    ) -> Tensor:
        return attend(queries, self._places_of(values), self._valid.unsqueeze(1))

    def _places_of(self, values: Tensor) -> Tensor:
        """Return the padded values of all rows, ``[R, longest, D]``."""
        padded = F.pad(values, (0, 0, 0, 1)).index_select(0, self._taken.flatten())
        return padded.view(-1, self._longest, values.shape[1])


def attention_rows(sequences: Sequence[JaggedTensor]) -> JaggedRows:
    """Return ``TracedRows`` during scripting or export, otherwise ``JaggedRows``."""
    return TracedRows(sequences) if is_traced() else JaggedRows(sequences)


def is_traced() -> bool:
    return bool(torch.jit.is_scripting())  # type: ignore[attr-defined]
