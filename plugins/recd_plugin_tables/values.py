"""Converts column values to ids, numbers, labels and times.

The id of a text is the 8-byte BLAKE2b digest of its UTF-8 bytes, as a little-endian integer,
shifted right by one bit. It has 63 bits and is the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_tables.kinds import (
    RULES,
    ColumnOptions,
    Unit,
    is_bytes,
    is_list,
    is_span,
    is_text,
    list_parts,
    plain,
)
from recd_plugins.api import DataError

_U64 = np.uint64
_FLOAT_BITS = {16: 11, 32: 24, 64: 53}
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# Integers whose digits form a date, such as 20240501.
_FORMATS: dict[Unit, str] = {
    "YYYYMMDD": "%Y%m%d",
    "YYMMDDHH": "%y%m%d%H",
    "YYYYMMDDHH": "%Y%m%d%H",
    "YYYYMMDDHHMM": "%Y%m%d%H%M",
    "YYYYMMDDHHMMSS": "%Y%m%d%H%M%S",
}
# Seconds since 1970 from 1973 to 2286.
_EPOCH: dict[Unit, tuple[float, float]] = {
    "s": (1e8, 1e10), "ms": (1e11, 1e13), "us": (1e14, 1e16), "ns": (1e17, 1e19),
}  # fmt: skip
# Seconds from 2000 to 2040.
_PLAUSIBLE = (946_684_800, 2_208_988_800)
# In microseconds; 1970-01-01 was a Thursday.
_HOUR, _DAY = 3_600 * 10**6, 86_400 * 10**6
_THURSDAY = 3 * _DAY
# Seconds since 1970 reach this in the year 5138, milliseconds did in 1973.
_LATEST_SECOND = 10**11


@dataclass(frozen=True)
class Cells:
    """Values of a column. ``place`` returns the file, row and column of a value for messages."""

    values: pa.Array
    place: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.values)

    def wrong(self, index: int, why: str) -> DataError:
        """Return an error for the value at ``index``. ``why`` says what is wrong and what to do."""
        text = repr(python_value(self.values[index]))
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        return DataError(f"{self.place(index)}: the value is {shown}. {why}")

    def items(self, values: pa.Array, offsets: NDArray[Any]) -> Cells:
        """Return cells for list elements ``values``, located in the list given by ``offsets``."""
        return Cells(values, lambda at: self.place(int(np.searchsorted(offsets, at, "right")) - 1))

    def decoded(self) -> Cells:
        """Return the same values without Arrow dictionary encoding."""
        if not pt.is_dictionary(self.values.type):
            return self
        return Cells(self.values.dictionary_decode(), self.place)


def python_value(scalar: pa.Scalar) -> Any:
    """Convert an Arrow scalar to a Python value; unsupported types become their storage value."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, LookupError):
        return getattr(scalar, "value", scalar.type)


def as_numpy(values: pa.Array, fill: Any) -> NDArray[Any]:
    """Convert an Arrow array to NumPy, with nulls replaced by ``fill``."""
    filled = values.fill_null(fill) if values.null_count else values
    return filled.to_numpy(zero_copy_only=False)


def nulls(values: pa.Array) -> NDArray[np.bool_]:
    """Return a mask of the null values, bool ``[B]``."""
    return values.is_null().to_numpy(zero_copy_only=False)


def text_id(text: str | bytes) -> int:
    """Hash a text to a 63-bit id, as described at the top of this module."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def text_ids(values: pa.Array) -> pa.Int64Array:
    """Hash texts or bytes to 63-bit ids; nulls stay null."""
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    words = values.dictionary.to_pylist()
    ids = pa.array([None if word is None else text_id(word) for word in words], pa.int64())
    return ids.take(values.indices)


def mixed(ids: NDArray[np.int64], salt: int = 0) -> NDArray[np.uint64]:
    """Hash ids with the SplitMix64 finalizer."""
    with np.errstate(over="ignore"):
        z = ids.view(_U64) + _U64(0x9E3779B97F4A7C15) * _U64(salt + 1)
        z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    return z ^ (z >> _U64(31))


def largest_whole(kind: pa.DataType) -> int:
    """Return the largest n for which a float type represents all integers from 0 to n."""
    return int(2 ** _FLOAT_BITS[kind.bit_width] - 1)


def number_type(kind: pa.DataType) -> pa.DataType:
    """Return float32 if it represents all values of an Arrow type exactly, otherwise float64."""
    kind = plain(kind)
    if is_list(kind):
        return number_type(kind.value_type)
    small = (pa.float32(), pa.float16(), pa.int16(), pa.uint16(), pa.int8(), pa.uint8(), pa.bool_())
    return pa.float32() if kind in small else pa.float64()


def numbers_of(cells: Cells, options: ColumnOptions) -> NDArray[np.float64]:
    """Convert each value to float64; nulls become NaN.

    Times become days since 1970 unless option ``by`` is set. Durations become seconds.
    """
    cells = cells.decoded()
    values, kind = cells.values, cells.values.type
    if pt.is_timestamp(kind) or pt.is_date(kind) or options.by is not None:
        return part(microseconds(cells, options.unit), options.by or "day")
    if is_span(kind):
        return seconds(values)
    if pt.is_boolean(kind):
        values = values.cast(pa.int8())
    if pt.is_decimal(kind):
        # Convert through text because Arrow's cast rounds twice: 0.70 would be less than 0.7.
        values = values.cast(pa.string())
    return as_numpy(values.cast(pa.float64(), safe=False), np.nan)


def seconds(values: pa.Array) -> NDArray[np.float64]:
    """Return times of day and durations in seconds, NaN for nulls."""
    kind = values.type
    whole = values.cast(pa.int32()) if pt.is_time32(kind) else values
    found = as_numpy(whole.cast(pa.int64()).cast(pa.float64(), safe=False), np.nan)
    return found / float(_PER_SECOND[kind.unit])


def number_rows(cells: Cells, options: ColumnOptions, width: int) -> NDArray[np.float64]:
    """Convert lists of ``width`` numbers to float64 ``[B, width]``; null or empty lists are NaN."""
    offsets, elements, empty = list_parts(cells.values)
    lost = empty.to_numpy(zero_copy_only=False) | (np.diff(offsets) == 0)
    wrong = ~lost & (np.diff(offsets) != width)
    if wrong.any():
        row = int(wrong.argmax())
        found = int(offsets[row + 1] - offsets[row])
        raise cells.wrong(
            row,
            f"This list has {found} numbers, but the first list of the column has {width}. Make "
            "all lists of the column equally long.",
        )
    rows = np.full((len(cells), width), np.nan)
    rows[~lost] = numbers_of(cells.items(elements, offsets), options).reshape(-1, width)
    return rows


_LARGE = (
    "Floats of this size cannot represent every integer, so ids would collide. Store the ids as "
    "integers; for a text file set source: {types: {COLUMN: uint64}}."
)
_QUOTED = r"""^(?:"(.*)"|'(.*)')$"""
# A text in one pair of brackets.
_BRACKETS = r"^\s*(?:\[([^\[\]]*)\]|\{([^{}]*)\})\s*$"
#: Message for numbers that cannot be ids.
WHOLE = "Ids must be 64-bit integers or text. Store the column as text, or set as: number."
_NULL = "The id is missing. Fill in a value, or set option 'missing' to 'empty', 'drop' or an id."


def ids_of(cells: Cells, options: ColumnOptions) -> pa.Int64Array:
    """Convert each value to an int64 id; nulls stay null.

    Integers are their own ids. uint64 values from 2^63 become the negative int64 with the same
    bits. Text and bytes are hashed. Dates become days since 1970. Option ``by`` selects the part of
    a time, such as the hour.
    """
    kind = cells.values.type
    inner = kind.value_type if pt.is_dictionary(kind) else kind
    if options.by is None and (is_text(inner) or is_bytes(inner)):
        return text_ids(cells.values)
    cells = cells.decoded()
    values, kind = cells.values, cells.values.type
    if options.by is not None:
        numbers = part(microseconds(cells, options.unit), options.by)
        return pc.floor(pa.array(numbers, mask=np.isnan(numbers))).cast(pa.int64())
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
            raise cells.wrong(at, _LARGE if large else WHOLE)
        return pa.array(np.where(empty, 0, numbers).astype(np.int64), mask=empty)
    if pt.is_decimal(kind):
        found = values.to_pylist()
        for at, value in enumerate(found):
            if value is not None and (value != int(value) or not -(2**63) <= value < 2**63):
                raise cells.wrong(at, WHOLE)
        return pa.array([None if value is None else int(value) for value in found], pa.int64())
    return values.cast(pa.int64())


def id_lists(cells: Cells, options: ColumnOptions) -> tuple[pa.ListArray, np.ndarray, int]:
    """Convert each row to a list of ids, with nulls handled according to option ``missing``.

    Returns:
        The lists, the rows to drop (bool ``[B]``), and the number of null lists and elements.
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
        dropped[np.searchsorted(offsets, np.flatnonzero(gaps), "right") - 1] = True
    if options.missing in (None, *RULES):
        before = np.concatenate([[0], np.cumsum(~gaps)])
        offsets, ids = before[offsets].astype(np.int32), ids.drop_null()
    else:
        one = missing_id(options.missing)
        found = ids.fill_null(one).to_numpy()
        ids = pa.array(np.insert(found, offsets[:-1][lost], one))
        offsets = np.concatenate([[0], np.cumsum(np.diff(offsets) + lost)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), ids), dropped, num_nulls


def missing_id(missing: object) -> int:
    """Return the id that replaces nulls: option ``missing`` if it is a value, otherwise 0."""
    if isinstance(missing, str) and missing not in RULES:
        return text_id(missing)
    return int(missing) if isinstance(missing, int | float) else 0


def _as_integers(items: Cells) -> Cells:
    texts = items.values.cast(pa.string())
    for text in texts.unique().to_pylist():
        if text is not None and not (
            re.fullmatch(r"-?\d{1,19}", text, re.ASCII) and -(2**63) <= int(text) < 2**63
        ):
            at = pc.index(texts, text).as_py()
            raise items.wrong(
                at,
                "The column has integers: true, but this text is not a 64-bit integer. Remove "
                "integers: true, so that texts are hashed.",
            )
    return Cells(texts.cast(pa.int64()), items.place)


def split_text(values: pa.Array, separator: str) -> pa.ListArray:
    """Split each text at a separator. Removes spaces and empty parts.

    With a comma or space as the separator, it also removes enclosing brackets, and quotes of the
    parts in brackets.
    """
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    bracketed = pc.match_substring_regex(values, _BRACKETS).fill_null(False)
    if separator.strip() in ("", ","):
        values = pc.replace_substring_regex(values, _BRACKETS, r"\1\2")
    offsets, parts, empty = list_parts(pc.split_pattern(values, separator))
    parts = pc.utf8_trim_whitespace(parts)
    if separator.strip() in ("", ",") and pc.any(bracketed).as_py():
        inside = np.repeat(bracketed.to_numpy(zero_copy_only=False), np.diff(offsets))
        bare = pc.replace_substring_regex(parts, _QUOTED, r"\1\2")
        parts = pc.if_else(pa.array(inside), bare, parts)
    kept = pc.not_equal(parts, "").to_numpy(zero_copy_only=False)
    before = np.concatenate([[0], np.cumsum(kept)])[offsets].astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(before), parts.filter(pa.array(kept)), mask=empty)


def labels_of(cells: Cells, options: ColumnOptions) -> NDArray[np.float64]:
    """Convert labels to 0 or 1 according to the options, float64 ``[B]``; nulls become NaN."""
    cells = cells.decoded()
    values = cells.values
    if is_text(values.type):
        chosen = pa.array(options.positive or (), pa.string())
        found = pc.is_in(values.cast(pa.string()), chosen).to_numpy(zero_copy_only=False)
        return np.where(nulls(values), np.nan, found.astype(np.float64))
    numbers = numbers_of(cells, options)
    empty = np.isnan(numbers)
    if options.positive_from is not None or options.positive is not None:
        given = options.positive if options.positive_from is None else [options.positive_from]
        chosen = _as_stored(values.type, [float(each) for each in given or ()])
        positive = np.isin(numbers, chosen) if options.positive_from is None else numbers >= chosen
        return np.where(empty, np.nan, positive)
    wrong = ~empty & (numbers != 0) & (numbers != 1)
    if wrong.any():
        raise cells.wrong(
            int(wrong.argmax()),
            "A label must be 0 or 1. Set positive_from: VALUE (labels of at least VALUE become 1) "
            "or positive: [VALUES] (these labels become 1).",
        )
    return numbers


def _as_stored(kind: pa.DataType, chosen: list[float]) -> NDArray[np.float64]:
    stored = {pa.float16(): np.float16, pa.float32(): np.float32}.get(kind, np.float64)
    with np.errstate(over="ignore"):
        return np.array(chosen).astype(stored).astype(np.float64)


class Texts:
    """Writes the distinct texts of each feature, with their ids, to a Parquet file per feature."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, dict[int, str]] = {}

    def add(self, feature: str, cells: Cells, options: ColumnOptions) -> None:
        """Collect the distinct texts of some rows."""
        values = cells.values
        if options.separator is not None:
            values = split_text(values, options.separator)
        if is_list(values.type):
            values = list_parts(values)[1]
        texts = values.unique().drop_null().cast(pa.string())
        ids = text_ids(texts).to_pylist()
        known = self._known.setdefault(feature, {})
        known.update(zip(ids, texts.to_pylist(), strict=True))

    def close(self) -> None:
        """Write ``folder/FEATURE.parquet`` for each feature."""
        for feature, known in self._known.items():
            self._folder.mkdir(parents=True, exist_ok=True)
            ids, texts = pa.array(known.keys(), pa.int64()), pa.array(known.values(), pa.string())
            path = self._folder / f"{feature}.parquet"
            pq.write_table(pa.table({"id": ids, "text": texts}), path, write_page_checksum=True)


def microseconds(cells: Cells, unit: Unit | None) -> pa.Int64Array:
    """Convert times of any type to int64 microseconds since 1970; nulls stay null.

    Args:
        cells: times, dates, texts such as 2024-05-01 10:00:00, or numbers.
        unit: unit of numeric times; None means seconds since 1970.
    """
    cells = cells.decoded()
    values = cells.values
    if pt.is_timestamp(values.type) or pt.is_date(values.type):
        if pt.is_timestamp(values.type):
            values = values.cast(pa.timestamp(values.type.unit))  # with a zone, it is UTC
        cut = values.type == pa.timestamp("ns")
        return values.cast(pa.timestamp("us"), safe=not cut).cast(pa.int64())
    if is_text(values.type):
        return _parsed(cells)
    if pt.is_decimal(values.type):
        values = values.cast(pa.string()).cast(pa.float64())
    numbers = as_numpy(values.cast(pa.float64()), np.nan) if pt.is_floating(values.type) else None
    empty = nulls(values)
    if numbers is not None:
        empty |= np.isnan(numbers)
    if unit in _FORMATS:
        times = _of_digits(values, unit)
        wrong = nulls(times) & ~empty
        if wrong.any():
            raise cells.wrong(
                int(wrong.argmax()),
                f"The value is not a date in the form {unit}. Correct the value or option 'unit'.",
            )
        return times
    per_second = _PER_SECOND[unit or "s"]
    if numbers is not None:
        found = np.where(empty, 0, numbers) / per_second
        _check(cells, found, unit)
        return pa.array(np.rint(found * 10**6).astype(np.int64), mask=empty)
    whole = as_numpy(values if pt.is_uint64(values.type) else values.cast(pa.int64()), 0)
    _check(cells, whole / per_second, unit)
    if per_second <= 10**6:
        micro = whole.astype(np.int64) * (10**6 // per_second)
    else:
        micro = (whole // (per_second // 10**6)).astype(np.int64)
    return pa.array(micro, mask=empty)


def _parsed(cells: Cells) -> pa.Int64Array:
    # Either all have a time zone, as 2024-05-01T10:00:00Z, or none has.
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        with suppress(pa.ArrowInvalid):
            return cells.values.cast(kind).cast(pa.int64())
    zoned = any("+" in str(v)[10:] or str(v).endswith("Z") for v in cells.values.slice(0, 1))
    kind = pa.timestamp("us", "UTC") if zoned else pa.timestamp("us")
    for index, value in enumerate(cells.values):
        try:
            value.cast(kind)
        except pa.ArrowInvalid as error:
            raise cells.wrong(
                index,
                "The text is not a time, or only some times have a UTC offset. Write every time "
                "in the form 2024-05-01 10:00:00.",
            ) from error
    raise AssertionError


def _check(cells: Cells, found: NDArray[np.float64], unit: Unit | None) -> None:
    wrong = np.abs(found) > _LATEST_SECOND
    if wrong.any():
        raise cells.wrong(
            int(wrong.argmax()),
            f"The time is too large for unit {unit or 's'}. Set option 'unit' to 'ms', 'us' or "
            "'ns'.",
        )


def _of_digits(values: pa.Array, unit: Unit) -> pa.Int64Array:
    """Parse numbers such as 20240501 to microseconds since 1970; others become null."""
    if pt.is_floating(values.type):
        values = pa.array(np.nan_to_num(as_numpy(values.cast(pa.float64()), -1), nan=-1))
    texts = values.cast(pa.int64(), safe=False).cast(pa.string())
    times = pc.strptime(texts, format=_FORMATS[unit], unit="us", error_is_null=True)
    whole = pc.equal(pc.utf8_length(texts), len(unit))  # strptime also accepts 2024501
    return pc.if_else(whole, times, None).cast(pa.int64())


def part(times: pa.Int64Array, by: Literal["hour", "weekday", "day"]) -> NDArray[np.float64]:
    """Return the hour of day, weekday (Monday is 0) or days since 1970 of times, with fractions."""
    micro: NDArray[Any] = as_numpy(times, 0)
    if by == "hour":
        found = (micro % _DAY) / _HOUR
    elif by == "weekday":
        found = ((micro + _THURSDAY) % (7 * _DAY)) / _DAY
    else:
        found = micro / _DAY
    return np.where(nulls(times), np.nan, found)


def possible_unit(numbers: NDArray[np.float64]) -> Unit | None:
    """Return the unit in which all numbers would be times between 2000 and 2040, or None."""
    least, largest = numbers.min(), numbers.max()
    for unit in _FORMATS:
        if len(f"{least:.0f}") == len(unit) == len(f"{largest:.0f}"):
            times = _of_digits(pa.array(np.unique(numbers)), unit)
            first, last = pc.min_max(times).as_py().values()
            if not times.null_count and is_plausible(first, last, "us"):
                return unit
    for epoch, (first, last) in _EPOCH.items():
        if first <= least and largest <= last:
            return epoch
    return None


def is_plausible(least: float, largest: float, unit: Unit) -> bool:
    """Return whether Unix times in ``unit`` lie between 2000 and 2040."""
    first, last = (each * _PER_SECOND[unit] for each in _PLAUSIBLE)
    return bool(first <= least and largest < last)
