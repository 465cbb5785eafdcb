"""Values of any type as ids: int64, equal where values are equal."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recd_plugin_tables.columns import RULES, ColumnOptions
from recd_plugin_tables.kinds import is_bytes, is_text
from recd_plugin_tables.leaves import list_parts
from recd_plugin_tables.values.cells import Cells, as_numpy, nulls
from recd_plugin_tables.values.hashing import text_id, text_ids
from recd_plugin_tables.values.numbers import largest_whole
from recd_plugin_tables.values.times import microseconds, part

_LARGE = (
    "a float as large stands for several whole numbers; store ids as integers, and of text set "
    "source: {types: {column: uint64}}"
)
# A text that is one pair of brackets and what they enclose.
_BRACKETS = r"^\s*(?:\[([^\[\]]*)\]|\{([^{}]*)\})\s*$"
_WHOLE = "ids are whole numbers or text; write it as text, or use it as number"


def ids_of(cells: Cells, options: ColumnOptions) -> pa.Int64Array:
    """An id a value, null where there is none.

    Whole numbers stay what they are, whatever type they have; those of uint64 from 2^63 on become
    the negative int64 of the same bits, so that none meets another. Text and bytes are hashed
    (``text_id``), false and true are 0 and 1, dates days since 1970. ``by`` makes times of all.

    Raises:
        DataError: a number is not whole, or is a float too large to be told from the next.
    """
    values = cells.values
    kind = values.type
    inner = kind.value_type if pt.is_dictionary(kind) else kind
    if options.by is None and (is_text(inner) or is_bytes(inner)):
        return text_ids(values)
    if pt.is_dictionary(kind):
        values = values.dictionary_decode()
        cells, kind = Cells(values, cells.place), values.type
    if options.by is not None:
        return pc.floor(_floats(part(microseconds(cells, options.unit), options.by))).cast(
            pa.int64()
        )
    if pt.is_date(kind):
        return values.cast(pa.date32()).cast(pa.int32()).cast(pa.int64())
    if pt.is_uint64(kind):
        return pa.array(as_numpy(values, 0).view(np.int64), mask=nulls(values))
    if pt.is_floating(kind):
        largest = largest_whole(kind)
        numbers = as_numpy(values.cast(pa.float64()), np.nan)
        empty = np.isnan(numbers)
        wrong = ~empty & ~((np.abs(numbers) <= largest) & (np.floor(numbers) == numbers))
        if wrong.any():
            at = int(wrong.argmax())
            large = np.floor(numbers[at]) == numbers[at] and np.isfinite(numbers[at])
            raise cells.wrong(at, _LARGE if large else _WHOLE)
        return pa.array(np.where(empty, 0, numbers).astype(np.int64), mask=empty)
    if pt.is_decimal(kind):
        return _whole_decimals(cells)
    return values.cast(pa.int64())


def id_lists(cells: Cells, options: ColumnOptions) -> tuple[pa.ListArray, np.ndarray, int]:
    """Lists of ids, one a row, without nulls.

    Returns:
        The lists; which rows ``missing`` says to drop, bool ``[B]``; how many nulls there were,
        lists and elements.

    Raises:
        DataError: a null where ``missing`` is error; as ``ids_of``.
    """
    if options.feature == "id":
        ids = ids_of(cells, options)
        offsets: np.ndarray = np.arange(len(ids) + 1, dtype=np.int32)
        items, lost = cells, np.zeros(len(ids), np.bool_)
    else:
        values = cells.values
        if options.separator is not None:
            values = split_text(values, options.separator)
        offsets, elements, empty = list_parts(values)
        items = cells.items(elements, offsets)
        if options.integers:
            items = _as_integers(items)
        ids = ids_of(items, options)
        lost = empty.to_numpy(zero_copy_only=False)
    gaps = nulls(ids)
    num_nulls = int(gaps.sum() + lost.sum())
    if options.missing == "error" and num_nulls:
        if lost.any():
            raise cells.wrong(int(lost.argmax()), _NULL)
        raise items.wrong(int(gaps.argmax()), _NULL)
    dropped = np.zeros(len(cells), np.bool_)
    if options.missing == "drop":
        dropped = lost.copy()
        dropped[_rows_of(offsets, gaps)] = True
    if options.missing in (None, *RULES):
        before = np.concatenate([[0], np.cumsum(~gaps)])
        offsets, ids = before[offsets].astype(np.int32), ids.drop_null()
    else:
        one = missing_id(options.missing)
        found = ids.fill_null(one).to_numpy()
        ids = pa.array(np.insert(found, offsets[:-1][lost], one))
        lengths = np.diff(offsets) + lost
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), ids), dropped, num_nulls


def _whole_decimals(cells: Cells) -> pa.Int64Array:
    values = cells.values
    try:
        return values.cast(pa.decimal128(38, values.type.scale)).cast(pa.int64())
    except pa.ArrowInvalid as error:
        found = values.to_pylist()
        for at, value in enumerate(found):
            if value is not None and value != int(value):
                raise cells.wrong(at, _WHOLE) from error
            if value is not None and not -(2**63) <= value < 2**63:
                raise cells.wrong(at, "ids are of 64 bits; write it as text") from error
        # With the zeros of their fractions they have more than 38 digits.
        return pa.array([None if value is None else int(value) for value in found], pa.int64())


_NULL = "give it a value, or set missing: to empty, drop or an id"


def missing_id(missing: object) -> int:
    """The id that stands for none, as option ``missing`` has it; 0 where it gives no value."""
    if isinstance(missing, str) and missing not in RULES:
        return text_id(missing)
    return int(missing) if isinstance(missing, int | float) else 0


def _rows_of(offsets: np.ndarray, gaps: np.ndarray) -> np.ndarray:
    return np.searchsorted(offsets, np.flatnonzero(gaps), "right") - 1


def _as_integers(items: Cells) -> Cells:
    """Texts as the whole numbers that they write."""
    texts = items.values.cast(pa.string())
    wrong = pc.invert(pc.match_substring_regex(texts, r"^-?\d{1,19}$")).fill_null(False)
    at = pc.index(wrong, True).as_py()
    if at < 0:
        try:
            return Cells(texts.cast(pa.int64()), items.place)
        except pa.ArrowInvalid:
            fits = (text is None or -(2**63) <= int(text) < 2**63 for text in texts.to_pylist())
            at = list(fits).index(False)
    raise items.wrong(at, "integers: true is for whole numbers of 64 bits; leave it out")


def split_text(values: pa.Array, separator: str) -> pa.ListArray:
    """Split texts at a separator into lists of parts, without spaces around them.

    Empty parts are left out. Brackets around a list with commas or spaces, as Python, JSON and
    PostgreSQL write it, are not part of its first and last element.
    """
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    if separator.strip() in ("", ","):
        values = pc.replace_substring_regex(values, _BRACKETS, r"\1\2")
    offsets, parts, empty = list_parts(pc.split_pattern(values, separator))
    parts = pc.utf8_trim_whitespace(parts)
    kept = pc.not_equal(parts, "").to_numpy(zero_copy_only=False)
    before = np.concatenate([[0], np.cumsum(kept)])[offsets].astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(before), parts.filter(pa.array(kept)), mask=empty)


def _floats(numbers: np.ndarray) -> pa.Array:
    return pa.array(numbers, mask=np.isnan(numbers))
