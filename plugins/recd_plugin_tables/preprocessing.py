"""Preprocessing steps fitted to the training split: vocabularies of ids, scaling of numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from recd_plugins.api import MOST_UNKNOWN, PluginError, PluginOptions, Preprocessing

if TYPE_CHECKING:
    from torch import Tensor


class FittedPreprocessing(Preprocessing):
    """Base class of preprocessing steps that compute tensors from the training split."""

    fit_rows = None
    _state: Mapping[str, Tensor] | None = None

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Return the fitted tensors, keyed by name, to store in a checkpoint."""
        if self._state is None:
            raise PluginError(
                f"{self.name}: transform() was called before fit(). Call fit() first."
            )
        return self._state

    def fitted_state(self) -> Mapping[str, Tensor]:
        return dict(self.state)

    def load_fitted_state(self, state: Mapping[str, Tensor]) -> None:
        self._state = dict(state)

    def identity(self) -> dict[str, Any]:
        if self._state is None:
            return {}
        digest = hashlib.sha256()
        for name, tensor in sorted(self._state.items()):
            digest.update(name.encode() + b"\0" + tensor.cpu().numpy().tobytes())
        return {"fitted": digest.hexdigest()[:16]}


# Number of distinct ids to buffer before counting them together.
_WAITING = 1 << 22


class Vocabulary(FittedPreprocessing):
    """Maps the ids of the training split to table rows; out-of-vocabulary ids share other rows.

    Training ids get rows 1, 2, ... by descending frequency.
    """

    name = "tables.vocabulary"
    scope = "id"

    class Options(PluginOptions):
        """Options for the size of the vocabulary and for out-of-vocabulary ids."""

        rows: int = Field(ge=2, le=2**40, description="Number of rows of the table.")
        min_count: int = Field(
            default=1,
            ge=1,
            description="Minimum frequency. Ids that occur less often in training are unknown.",
        )
        others: Literal["hash", "unknown"] = Field(
            default="hash",
            description="unknown: all unknown ids share row 0. hash: unknown ids are hashed "
            "to row 0 and to the rows that no known id uses.",
        )
        hash_rows: int | None = Field(
            default=None,
            ge=1,
            description="For hash: minimum number of rows for unknown ids; null means a tenth"
            " of rows.",
        )

        shared: bool = Field(
            default=False,
            description="Build one vocabulary for all features of the entry, for example if "
            "they share a table.",
        )

        @model_validator(mode="after")
        def _fit_together(self) -> Self:
            if self.hash_rows is not None and self.others != "hash":
                raise ValueError(
                    "option 'hash_rows' needs others: hash. Remove 'hash_rows', or set others: hash"
                )
            if self.num_others >= self.rows:
                raise ValueError(
                    f"option 'rows' is {self.rows}, but unknown ids take {self.num_others} rows, "
                    "so no rows remain for known ids. Increase 'rows'"
                )
            return self

        @property
        def num_others(self) -> int:
            """Number of table rows for out-of-vocabulary ids."""
            if self.others == "unknown":
                return 1
            return self.hash_rows or max(1, self.rows // 10)

    options: Options

    def __init__(self, options: PluginOptions) -> None:
        super().__init__(options)
        self.fits_together = self.options.shared
        self._counted: list[tuple[Tensor, Tensor]] = []

    @property
    def num_ids(self) -> int:
        return self.options.rows

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_counted": []}

    def fit(self, feature: str, rows: Iterator[tuple[Tensor, Tensor]]) -> None:  # noqa: ARG002
        import torch

        none = torch.empty(0, dtype=torch.int64)
        parts, num_waiting = [(none, none), *self._counted], 0
        for values, _ in rows:
            parts.append(torch.unique(values, return_counts=True))
            num_waiting += parts[-1][0].numel()
            if num_waiting > _WAITING + parts[0][0].numel():
                parts, num_waiting = [_together(parts)], 0
        ids, counts = _together(parts)
        self._counted = [(ids, counts)] if self.options.shared else []
        often = counts >= self.options.min_count
        ids, counts = ids[often], counts[often]
        # Break ties by the smaller id, so that all ranks agree.
        order = torch.sort(counts, descending=True, stable=True).indices
        known = ids[order[: self.options.rows - self.options.num_others]]
        ordered, place = known.sort()
        self._state = {"ids": ordered, "rows": place + 1}

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        ids, rows = (self.state[name].to(values.device) for name in ("ids", "rows"))
        others = self._others(values, ids.numel())
        if not ids.numel():
            self._meet(values)
            return others, offsets
        at = torch.searchsorted(ids, values).clamp(max=ids.numel() - 1)
        known = ids[at] == values
        if self.unknown_ids is not None:
            self._meet(values[~known])
        return torch.where(known, rows[at], others), offsets

    def original_values(self) -> list[int | None]:
        """Return the original id of each table row, or None for rows of out-of-vocabulary ids."""
        found: list[int | None] = [None] * self.options.rows
        ids, rows = (self.state[name].tolist() for name in ("ids", "rows"))
        for known, row in zip(ids, rows, strict=True):
            found[row] = known
        return found

    def _meet(self, unknown: Tensor) -> None:
        import torch

        if self.unknown_ids is not None and len(self.unknown_ids) < MOST_UNKNOWN:
            self.unknown_ids.update(torch.unique(unknown).tolist())

    def _others(self, values: Tensor, num_known: int) -> Tensor:
        import torch

        if self.options.others == "unknown":
            return torch.zeros_like(values)
        bucket = _mix(values) % (self.options.rows - num_known)
        return torch.where(bucket == 0, bucket, bucket + num_known)


def _together(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    import torch

    ids, where = torch.unique(torch.cat([ids for ids, _ in parts]), return_inverse=True)
    counts = torch.zeros_like(ids)
    return ids, counts.index_add_(0, where, torch.cat([counts for _, counts in parts]))


def _mix(ids: Tensor) -> Tensor:
    z = ids + -7046029254386353131  # 0x9E3779B97F4A7C15
    z = (z ^ _shifted(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shifted(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return (z ^ _shifted(z, 31)) & 0x7FFF_FFFF_FFFF_FFFF


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


class Standardise(FittedPreprocessing):
    """Subtracts the mean of the training split and divides by its standard deviation."""

    name = "tables.standardise"
    scope = "id"
    takes = ("numbers",)

    def fit(self, feature: str, rows: Iterator[tuple[Tensor, Tensor]]) -> None:  # noqa: ARG002
        import torch

        # Chan, Golub and LeVeque's sum of squares, which stays exact for large means.
        count, mean, squares = 0, 0.0, 0.0
        least, largest = math.inf, -math.inf
        for values, _ in rows:
            if not values.numel():
                continue
            part = values.double()
            num, part_mean = values.numel(), float(part.mean())
            squares += float((part - part_mean).square().sum())
            squares += (part_mean - mean) ** 2 * count * num / (count + num)
            mean += (part_mean - mean) * num / (count + num)
            count += num
            least, largest = min(least, float(part.min())), max(largest, float(part.max()))
        deviation = math.sqrt(squares / count) if count else 0.0
        # A constant number becomes 0, whatever rounding error its deviation has.
        constant = least >= largest
        mean = least if count and constant else mean
        self._state = {
            "mean": torch.tensor([mean], dtype=torch.float64),
            "deviation": torch.tensor([1.0 if constant else deviation], dtype=torch.float64),
        }

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = (self.state[name].to(values.device) for name in ("mean", "deviation"))
        return ((values.double() - mean) / deviation).to(values.dtype), offsets


class Log1p(Preprocessing):
    """Replaces x by log(1 + x), or by -log(1 - x) if x is negative."""

    name = "tables.log1p"
    scope = "id"
    takes = ("numbers",)

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return values.sign() * values.abs().log1p(), offsets


# Number of samples kept to find the bucket borders.
_MAX_KEPT = 1 << 22


class Quantiles(FittedPreprocessing):
    """Replaces a number by the index of its quantile bucket, scaled to 0 to 1."""

    name = "tables.quantiles"
    scope = "id"
    takes = ("numbers",)

    class Options(PluginOptions):
        """Options of the quantile transform."""

        buckets: int = Field(default=100, ge=2, le=2**20, description="Number of buckets.")

    options: Options

    def fit(self, feature: str, rows: Iterator[tuple[Tensor, Tensor]]) -> None:  # noqa: ARG002
        import torch

        from recd_plugins.api import jagged

        kept, num_kept, step, seen = [torch.empty(0, dtype=torch.float64)], 0, 1, 0
        for values, _ in rows:
            # Keep every step-th number, independent of batch boundaries.
            kept.append(values[-seen % step :: step].double())
            seen += values.numel()
            num_kept += kept[-1].numel()
            while num_kept > _MAX_KEPT:
                kept = [torch.cat(kept)[::2]]
                num_kept, step = kept[0].numel(), 2 * step
        numbers = torch.cat(kept).sort().values
        inner = torch.arange(1, self.options.buckets) * numbers.numel() // self.options.buckets
        borders = numbers[inner] if numbers.numel() else numbers
        self._state = {"borders": jagged.rounded_borders(borders)}

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        borders = self.state["borders"].to(values.device)
        buckets = torch.searchsorted(borders, values.to(borders.dtype).contiguous(), right=True)
        return (buckets / (self.options.buckets - 1)).to(values.dtype), offsets
