"""Labels: values of any type as 0 or 1."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_tables.columns import ColumnOptions
from recd_plugin_tables.kinds import is_text
from recd_plugin_tables.values.cells import Cells
from recd_plugin_tables.values.numbers import LARGEST_WHOLE, numbers_of


def labels_of(cells: Cells, options: ColumnOptions) -> NDArray[np.float64]:
    """0 or 1 a value, NaN where there is none.

    Raises:
        DataError: a value is another number, and no option says which are positive.
    """
    values = cells.values
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
        cells = Cells(values, cells.place)
    if is_text(values.type):
        chosen = pa.array(options.positive or (), pa.string())
        found = pc.is_in(values.cast(pa.string()), chosen).to_numpy(zero_copy_only=False)
        empty = values.is_null().to_numpy(zero_copy_only=False)
        return np.where(empty, np.nan, found.astype(np.float64))
    numbers = numbers_of(cells, options)
    empty = np.isnan(numbers)
    if options.positive_from is not None:
        _check_told_apart(cells, numbers)
        (start,) = _as_stored(values.type, [options.positive_from])
        return np.where(empty, np.nan, numbers >= start)
    if options.positive is not None:
        _check_told_apart(cells, numbers)
        chosen = _as_stored(values.type, _as_numbers(cells, options.positive))
        return np.where(empty, np.nan, np.isin(numbers, chosen))
    wrong = ~empty & (numbers != 0) & (numbers != 1)
    if wrong.any():
        raise cells.wrong(
            int(wrong.argmax()),
            "a label is 0 or 1; say which values are 1 by positive_from: (this value and those "
            "above) or positive: [values]",
        )
    return numbers


def _as_stored(kind: pa.DataType, chosen: list[float]) -> NDArray[np.float64]:
    """What a column of this type holds where a user writes these: 0.7 is less as a float32."""
    stored = {pa.float16(): np.float16, pa.float32(): np.float32}.get(kind, np.float64)
    with np.errstate(over="ignore"):
        return np.array(chosen).astype(stored).astype(np.float64)


def _check_told_apart(cells: Cells, numbers: NDArray[np.float64]) -> None:
    wrong = np.zeros(0) if pt.is_floating(cells.values.type) else np.abs(numbers) > LARGEST_WHOLE
    if wrong.any():
        raise cells.wrong(
            int(wrong.argmax()),
            "numbers beyond 2^53 are not told from their neighbours; make the label 0 or 1",
        )


def _as_numbers(cells: Cells, chosen: tuple[object, ...]) -> list[float]:
    try:
        return [float(each) for each in chosen]  # type: ignore[arg-type]
    except ValueError as error:
        raise cells.wrong(
            0, f"the label holds numbers, and positive: has text ({error})"
        ) from error
