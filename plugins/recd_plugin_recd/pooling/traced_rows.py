"""Attention within rows as ``torch.export`` can follow it: all rows padded to the longest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugin_recd.pooling.packed_rows import JaggedRows


class TracedRows(JaggedRows):
    """What ``JaggedRows`` computes, up to rounding, by the same operations whatever the lengths.

    Args:
        sequences: jagged tensors of values ``[num_values, D]``.
        inverse: the row of each target, int64 ``[B]``: rows are then those of the targets, and
            ``weighted_sums`` alone can be asked. None: the rows themselves.
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
        # What is padded is the value behind the last.
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
        """``[R, longest, D]``."""
        padded = F.pad(values, (0, 0, 0, 1)).index_select(0, self._taken.flatten())
        return padded.view(-1, self._longest, values.shape[1])


def attention_rows(sequences: Sequence[JaggedTensor]) -> JaggedRows:
    """The rows of these sequences, as they are attended to where this runs: exported, or not."""
    return TracedRows(sequences) if is_traced() else JaggedRows(sequences)


def is_traced() -> bool:
    """Whether a script or a program is made of what runs."""
    return bool(torch.jit.is_scripting())  # type: ignore[attr-defined]
