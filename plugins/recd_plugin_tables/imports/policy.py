"""What becomes of values that are missing, and of numbers that are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recd_plugin_tables.columns import ColumnOptions
from recd_plugin_tables.values.cells import Cells

OnNan = Literal["error", "drop", "zero"]


@dataclass(frozen=True)
class Kept:
    """Values of a column after that.

    Attributes:
        values: finite numbers.
        dropped: rows to leave out, bool ``[B]``.
        num_filled: how many values were missing or no number, those of dropped rows too.
    """

    values: NDArray[np.float64]
    dropped: NDArray[np.bool_]
    num_filled: int


def finite(
    cells: Cells,
    numbers: NDArray[np.float64],
    options: ColumnOptions,
    on_nan: OnNan,
    *,
    scoring: bool = False,
) -> Kept:
    """Numbers of a dense feature, finite as float32.

    Args:
        cells: the column, for errors.
        numbers: ``[B]`` or ``[B, width]``, NaN where a value is missing.
        options: its ``missing`` is for null and NaN, in place of ``on_nan``.
        on_nan: for what is missing, and for what is infinite as float32.
        scoring: the model is trained, and by these rules.

    Raises:
        DataError: a value is missing or infinite, and the rule for it is error.
    """
    gaps = np.isnan(numbers)
    with np.errstate(over="ignore"):
        endless = ~gaps & ~np.isfinite(numbers.astype(np.float32))
    rule = on_nan if options.missing is None else options.missing
    values = numbers.copy()
    dropped = np.zeros(len(cells), np.bool_)
    for wrong, how in ((gaps, rule), (endless, on_nan)):
        if not wrong.any():
            continue
        in_row = wrong if wrong.ndim == 1 else wrong.any(axis=1)
        if how == "error":
            advice = _MISSING if wrong is gaps else _INFINITE
            raise cells.wrong(int(in_row.argmax()), _TRAINED if scoring else advice)
        if how == "drop":
            dropped |= in_row
        values[wrong] = how if isinstance(how, int | float) else 0.0
    return Kept(values, dropped, int(gaps.sum() + endless.sum()))


def given(cells: Cells, numbers: NDArray[np.float64], options: ColumnOptions) -> Kept:
    """Labels, NaN where there is none, after ``missing``.

    Raises:
        DataError: one is missing and ``missing`` gives no value.
    """
    gaps = np.isnan(numbers)
    if gaps.any() and options.missing in (None, "error"):
        raise cells.wrong(int(gaps.argmax()), "set missing: drop, 0 or 1 for it")
    drops = options.missing == "drop"
    fill = 0.0 if drops or not isinstance(options.missing, int | float) else options.missing
    none = np.zeros_like(gaps)
    return Kept(np.where(gaps, fill, numbers), gaps if drops else none, int(gaps.sum()))


_OF_32_BITS = "features are finite numbers of 32 bits; set"
_MISSING = (
    f"{_OF_32_BITS} missing: of this column to a value (for null and NaN), or on_nan: of the "
    "dataset to drop or zero"
)
_INFINITE = f"{_OF_32_BITS} on_nan: of the dataset to drop or zero"
_TRAINED = (
    "features are finite numbers of 32 bits, and the model was trained with no rule for others: "
    "write one, or leave the row out"
)
