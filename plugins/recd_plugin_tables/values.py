"""Hashes of text and bytes: the same in every run, on every machine, and by ten lines elsewhere.

The id of a text is the first 8 bytes of BLAKE2b (digest of 8 bytes) of its UTF-8, little-endian,
without the lowest bit: 63 bits, from 0 on. Of 100 million texts two have one id with a chance of
1 in 1,800.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_tables.columns import RULES, ColumnOptions
from recd_plugin_tables.kinds import is_bytes, is_list, is_span, is_text, list_parts, plain
from recd_plugin_tables.times import Cells, as_numpy, microseconds, nulls, part
from recd_plugins.api import DataError

_U64 = np.uint64


def text_id(text: str | bytes) -> int:
    """The id of a text."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def text_ids(values: pa.Array) -> pa.Int64Array:
    """The ids of texts or bytes, null where they are; each distinct one is hashed once."""
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    words = values.dictionary.to_pylist()
    ids = pa.array([None if word is None else text_id(word) for word in words], pa.int64())
    return ids.take(values.indices)


def mixed(ids: NDArray[np.int64], salt: int = 0) -> NDArray[np.uint64]:
    """Bits of ids spread evenly (the finaliser of SplitMix64), another way with each salt."""
    with np.errstate(over="ignore"):
        z = ids.view(_U64) + _U64(0x9E3779B97F4A7C15) * _U64(salt + 1)
        z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    return z ^ (z >> _U64(31))


#: Every whole number up to here is a float64 that no other one is rounded to.
LARGEST_WHOLE = 2**53 - 1
# Bits of the whole numbers that a float of 16, 32 or 64 bits tells apart.
_FLOAT_BITS = {16: 11, 32: 24, 64: 53}


def largest_whole(kind: pa.DataType) -> int:
    """Return the largest whole number below which a float of this type tells all apart."""
    return int(2 ** _FLOAT_BITS[kind.bit_width] - 1)


def number_type(kind: pa.DataType) -> pa.DataType:
    """Return float32 if it holds every value of a type, or of lists of it; else float64."""
    kind = plain(kind)
    if is_list(kind):
        return number_type(kind.value_type)
    small = (pa.float32(), pa.float16(), pa.int16(), pa.uint16(), pa.int8(), pa.uint8(), pa.bool_())
    return pa.float32() if kind in small else pa.float64()


def numbers_of(cells: Cells, options: ColumnOptions) -> NDArray[np.float64]:
    """A number a value. Times are days since 1970 unless ``by`` says else, durations seconds."""
    values = cells.values
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if pt.is_timestamp(kind) or pt.is_date(kind) or options.by is not None:
        times = microseconds(Cells(values, cells.place), options.unit)
        return part(times, options.by or "day")
    if is_span(kind):
        return seconds(values)
    if pt.is_boolean(kind):
        values = values.cast(pa.int8())
    if pt.is_decimal(kind):
        # By their text, as Arrow's own cast rounds twice: 0.70 would be less than 0.7.
        values = values.cast(pa.string())
    # Integers beyond 2^53 are rounded.
    return as_numpy(values.cast(pa.float64(), safe=False), np.nan)


def seconds(values: pa.Array) -> NDArray[np.float64]:
    """Times of day and durations in seconds, NaN where there is none."""
    kind = values.type
    per_second = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit]
    whole = values.cast(pa.int32()) if pt.is_time32(kind) else values
    return as_numpy(whole.cast(pa.int64()).cast(pa.float64(), safe=False), np.nan) / per_second


def number_rows(cells: Cells, options: ColumnOptions, width: int) -> NDArray[np.float64]:
    """Lists of ``width`` numbers as ``[B, width]``, NaN where there is none."""
    offsets, elements, empty = list_parts(cells.values)
    lost = empty.to_numpy(zero_copy_only=False) | (np.diff(offsets) == 0)
    wrong = ~lost & (np.diff(offsets) != width)
    if wrong.any():
        row = int(wrong.argmax())
        found = int(offsets[row + 1] - offsets[row])
        raise cells.wrong(
            row, f"it has {found} numbers and the first list has {width}; lists of numbers are all "
            "of one length"
        )  # fmt: skip
    rows = np.full((len(cells), width), np.nan)
    rows[~lost] = numbers_of(cells.items(elements, offsets), options).reshape(-1, width)
    return rows


_LARGE = (
    "a float as large stands for several whole numbers; store ids as integers, and of text set "
    "source: {types: {column: uint64}}"
)
# A text that is one pair of brackets and what they enclose.
_BRACKETS = r"^\s*(?:\[([^\[\]]*)\]|\{([^{}]*)\})\s*$"
_WHOLE = "ids are whole numbers of 64 bits or text; write it as text, or use it as number"


def ids_of(cells: Cells, options: ColumnOptions) -> pa.Int64Array:
    """An id a value, null where there is none.

    Whole numbers stay what they are, whatever type they have; those of uint64 from 2^63 on become
    the negative int64 of the same bits, so that none meets another. Text and bytes are hashed
    (``text_id``), false and true are 0 and 1, dates days since 1970. ``by`` makes times of all.
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
    found = cells.values.to_pylist()
    for at, value in enumerate(found):
        if value is not None and (value != int(value) or not -(2**63) <= value < 2**63):
            raise cells.wrong(at, _WHOLE)
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
    """Return texts as the integers that they write."""
    texts = items.values.cast(pa.string())
    for text in texts.unique().to_pylist():
        if text is not None and not (
            re.fullmatch(r"-?\d{1,19}", text, re.ASCII) and -(2**63) <= int(text) < 2**63
        ):
            at = pc.index(texts, text).as_py()
            raise items.wrong(at, "integers: true is for whole numbers of 64 bits; leave it out")
    return Cells(texts.cast(pa.int64()), items.place)


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


def labels_of(cells: Cells, options: ColumnOptions) -> NDArray[np.float64]:
    """0 or 1 a value, NaN where there is none."""
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
        chosen = _as_stored(values.type, [float(each) for each in options.positive])
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


_SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])


class Texts:
    """Files of the id and the text of each id of some features, one a feature.

    Args:
        folder: where they are written, as ``FEATURE.parquet``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, dict[int, str]] = {}

    def add(self, feature: str, cells: Cells, options: ColumnOptions) -> None:
        """The texts of some rows."""
        values = cells.values
        if options.separator is not None:
            values = split_text(values, options.separator)
        if is_list(values.type):
            values = list_parts(values)[1]
        texts = values.unique().drop_null().cast(pa.string())
        ids = text_ids(texts).to_pylist()
        known = self._known.setdefault(feature, {})
        for number, text in zip(ids, texts.to_pylist(), strict=True):
            if known.setdefault(number, text) != text:
                raise DataError(
                    f"column of feature {feature}: {text!r} and {known[number]!r} have one id, "
                    f"{number}; write other names"
                )

    def close(self) -> None:
        """Write them."""
        for feature, known in self._known.items():
            self._folder.mkdir(parents=True, exist_ok=True)
            ids = pa.array(known.keys(), pa.int64())
            table = pa.table([ids, pa.array(known.values())], schema=_SCHEMA)
            pq.write_table(table, self._folder / f"{feature}.parquet", write_page_checksum=True)
