"""Preprocessing as TorchScript-compatible modules.

Each module accepts and returns the ``values`` and ``offsets`` of a feature with N rows. ``values``
are int64 ids or float32 numbers. ``offsets`` are int32 or int64 ``[N + 1]`` and start at 0. On the
CPU, modules call Numba kernels. In TorchScript and on other devices they call torch operators, with
the same results.
"""

# No ``from __future__ import annotations``: torch.jit.script needs real annotations.
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recd_plugin_recd.preprocessing import kernels
from recd_plugins.api import jagged

_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1


class SigridHash(nn.Module):
    """Hashes ids to the range [0, buckets), like ``functional.sigrid_hash`` of TorchArrow."""

    def __init__(self, buckets: int, salt: int = 0) -> None:
        super().__init__()
        self.buckets = buckets
        self.salt = salt

    def forward(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.jit.is_scripting() and values.device.type == "cpu":  # type: ignore[attr-defined]
            return kernels.hash_ids(values, self.salt, self.buckets), offsets
        return sigrid_hash(values, self.salt, self.buckets), offsets


class FirstX(nn.Module):
    """Keeps the first ``x`` values of each row, like ``functional.firstx`` of TorchArrow."""

    def __init__(self, x: int) -> None:
        super().__init__()
        self.x = x

    def forward(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        new_offsets = jagged.offsets_of(self.kept_lengths(offsets.diff()))
        if not torch.jit.is_scripting() and values.device.type == "cpu":  # type: ignore[attr-defined]
            return kernels.first_of_rows(values, offsets, new_offsets), new_offsets
        places = jagged.positions_of_ranges(offsets[:-1], new_offsets.diff())
        return values.index_select(0, places), new_offsets

    def kept_lengths(self, lengths: Tensor) -> Tensor:
        return lengths.clamp(max=self.x)


class Bucketize(nn.Module):
    """Returns the number of borders below each value, like ``functional.bucketize`` of TorchArrow.

    For ids, borders are rounded down. Numbers and borders are compared in float32, or in float64 if
    borders are equal in float32.
    """

    id_borders: Tensor
    number_borders: Tensor

    def __init__(self, borders: Sequence[int | float]) -> None:
        super().__init__()
        whole = [_within_int64(border) for border in borders]
        self.register_buffer("id_borders", torch.tensor(whole))
        numbers = torch.tensor([float(border) for border in borders], dtype=torch.float64)
        self.register_buffer("number_borders", jagged.rounded_borders(numbers))

    def forward(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        borders, dtype = self.id_borders, values.dtype
        if values.is_floating_point():
            borders = self.number_borders
            values = values.to(borders.dtype)
        if not torch.jit.is_scripting() and values.device.type == "cpu":  # type: ignore[attr-defined]
            return kernels.count_below(values, borders).to(dtype), offsets
        return torch.bucketize(values, borders).to(dtype), offsets


class NGram(nn.Module):
    """Replaces the m ids of a row by hashes of each ``n`` consecutive ids, m - n + 1 in all."""

    def __init__(self, n: int, salt: int = 0) -> None:
        super().__init__()
        self.n = n
        self.salt = salt

    def forward(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        new_offsets = jagged.offsets_of((offsets.diff() - (self.n - 1)).clamp(min=0))
        if not torch.jit.is_scripting() and values.device.type == "cpu":  # type: ignore[attr-defined]
            hashes = kernels.hash_windows(values, offsets, new_offsets, self.n, self.salt)
            return hashes, new_offsets
        places = jagged.positions_of_ranges(offsets[:-1], new_offsets.diff())
        hashes = torch.full_like(places, self.salt)
        for at in range(self.n):
            hashes = combine(hashes, values.index_select(0, places + at))
        return hashes & 0x7FFFFFFFFFFFFFFF, new_offsets


class MapId(nn.Module):
    """Replaces ids according to ``mapping``. Other ids become ``default``, or stay if None."""

    sources: Tensor
    targets: Tensor

    def __init__(
        self, mapping: dict[int, int] | Sequence[tuple[int, int]], default: int | None = None
    ) -> None:
        super().__init__()
        pairs = sorted(dict(mapping).items())
        self.register_buffer("sources", torch.tensor([source for source, _ in pairs]))
        self.register_buffer("targets", torch.tensor([target for _, target in pairs]))
        self.keep_others = default is None
        self.default = 0 if default is None else default

    def forward(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.searchsorted(self.sources, values).clamp(max=self.sources.numel() - 1)
        others = values if self.keep_others else torch.full_like(values, self.default)
        found = self.sources.index_select(0, places) == values
        return torch.where(found, self.targets.index_select(0, places), others), offsets


class Clamp(nn.Module):
    """Clamps values to [lower, upper], like ``clamp`` of TorchArrow. None means no bound."""

    def __init__(self, lower: float | None = None, upper: float | None = None) -> None:
        super().__init__()
        self.lowest_id = _MIN_INT64 if lower is None else _within_int64(lower)
        self.highest_id = _MAX_INT64 if upper is None else _within_int64(upper)
        self.lower = -math.inf if lower is None else _as_float32(lower)
        self.upper = math.inf if upper is None else _as_float32(upper)

    def forward(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        if values.is_floating_point():
            return values.clamp(self.lower, self.upper), offsets
        return values.clamp(self.lowest_id, self.highest_id), offsets


class Logit(nn.Module):
    """Computes log(x / (1 - x)), with x clamped to [eps, 1 - eps], like ``Logit`` of Caffe2."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return torch.logit(values, eps=self.eps), offsets


class BoxCox(nn.Module):
    """Computes (y^lambda1 - 1) / lambda1, with y = max(x + lambda2, 1e-6).

    If ``lambda1`` is 0, computes log(y). Equals ``BatchBoxCox`` of Caffe2.
    """

    def __init__(self, lambda1: float, lambda2: float = 0.0) -> None:
        super().__init__()
        self.lambda1 = lambda1
        self.lambda2 = lambda2

    def forward(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        shifted = (values + self.lambda2).clamp(min=1e-6)
        if self.lambda1 == 0.0:
            return shifted.log(), offsets
        # expm1 is accurate where the power is close to 1.
        return torch.expm1(self.lambda1 * shifted.log()) / self.lambda1, offsets


class Onehot(nn.Module):
    """Replaces each value v by ``classes`` values: 1 at index v, and 0 elsewhere."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(self.classes, device=values.device)
        marked = values.unsqueeze(1) == places
        return marked.to(values.dtype).flatten(), offsets.long() * self.classes


def _within_int64(bound: float) -> int:
    return min(max(math.floor(bound), _MIN_INT64), _MAX_INT64)


def _as_float32(bound: float) -> float:
    """Round to float32. Returns infinity for larger numbers, for which torch raises an error."""
    return float(torch.tensor(bound, dtype=torch.float64).float())


def sigrid_hash(ids: Tensor, salt: int, buckets: int) -> Tensor:
    """Hash int64 ids to the range [0, buckets)."""
    return torch.remainder(combine(torch.full_like(ids, salt), ids), buckets)


def combine(hashes: Tensor, ids: Tensor) -> Tensor:
    """Update 64-bit hashes, int64, with one more id each. Order matters."""
    city = -7070675565921424023  # 0x9DDFEA08EB382D69 as a signed number
    first = (_mix(ids) ^ hashes) * city
    first = first ^ _shifted(first, 47)
    second = (hashes ^ first) * city
    return (second ^ _shifted(second, 47)) * city


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift the bits of int64 numbers to the right and fill with zeros (logical shift)."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _mix(ids: Tensor) -> Tensor:
    ids = ~ids + (ids << 21)
    ids = ids ^ _shifted(ids, 24)
    ids = ids + (ids << 3) + (ids << 8)
    ids = ids ^ _shifted(ids, 14)
    ids = ids + (ids << 2) + (ids << 4)
    ids = ids ^ _shifted(ids, 28)
    return ids + (ids << 31)
