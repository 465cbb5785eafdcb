"""Cells of one column, and where each stands, so that errors can say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugins.api import DataError

_MAX_SHOWN = 60


@dataclass(frozen=True)
class Cells:
    """Values of a column in order.

    Attributes:
        values: as the table has them.
        place: names file, row and column of the value at an index.
    """

    values: pa.Array
    place: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.values)

    def wrong(self, index: int, why: str) -> DataError:
        """The error of a value: where it stands, what it is, and what to do."""
        text = repr(python_value(self.values[index]))
        shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
        return DataError(f"{self.place(index)}: the value is {shown}; {why}")

    def items(self, values: pa.Array, offsets: NDArray[Any]) -> Cells:
        """The elements of these lists; a place is that of the list."""
        return Cells(values, lambda at: self.place(int(np.searchsorted(offsets, at, "right")) - 1))


def python_value(scalar: pa.Scalar) -> Any:
    """A value as Python has it; as it is stored where Python has none."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, LookupError):
        # A time with nanoseconds, for which pandas is needed, of the year 10000, or of a zone that
        # this machine does not know.
        return getattr(scalar, "value", scalar.type)


def as_numpy(values: pa.Array, fill: Any) -> NDArray[Any]:
    """Values as an array, ``fill`` where they are null."""
    filled = values.fill_null(fill) if values.null_count else values
    return filled.to_numpy(zero_copy_only=False)


def nulls(values: pa.Array) -> NDArray[np.bool_]:
    """Which values are null."""
    return values.is_null().to_numpy(zero_copy_only=False)
