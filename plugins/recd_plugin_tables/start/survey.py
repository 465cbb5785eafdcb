"""Samples a table and collects statistics of each column."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_tables.kinds import (
    Leaf,
    Unit,
    is_list,
    is_span,
    is_text,
    leaf_array,
    leaves,
    list_parts,
    normal,
    plain,
)
from recd_plugin_tables.plan import explode_problems
from recd_plugin_tables.sources import Source
from recd_plugin_tables.sources.files import no_header
from recd_plugin_tables.sources.text import is_number
from recd_plugin_tables.values import possible_unit, python_value, seconds, split_text
from recd_plugins.api import DataError

# Maximum rows and bytes of a sample.
_SAMPLE_ROWS = 200_000
_SAMPLE_BYTES = 256_000_000
# Separators of ids in a text (Hive writes the control characters). The first one that occurs in
# this share of the texts is used. A space is last, because it often follows other separators.
_SEPARATORS = (
    *"|;^~#>\x01\x02\x03\x1d\x1e\x1f\t\n｜；、，",
    *("::", " / ", " - ", " & ", " + ", ",", " "),
)
_SEPARATED = 0.2
# A flat list such as [1, 2] or ["a", "b"] as text, and a number with a fraction in it.
_FLAT_LIST = r"^\s*\[[^\[\]{}]*\]\s*$"
_FRACTION = r"^-?\d*\.\d*(e[-+]?\d+)?$"
# Number of texts to try to parse as times.
_LOOKED_AT = 1000
# An integer written as text.
_WRITTEN = r"^(0|-?[1-9]\d{0,18})$"
# Minimum share of values not below the previous row's in a log that is nearly in order.
_RISING = 0.95
# A value cannot identify a user or session if it has this share of all rows, and this multiple of
# the mean share of other values. Placeholder values have lower limits.
_DOMINANT = (0.05, 20)
_DOMINANT_PLACEHOLDER = (0.01, 5)
_PLACEHOLDER = re.compile(
    r"(?i)[\W_0]*|-1(\.0)?|-?999+|[\W_]*(unknown\w*|null|none|nil|nan|n|na|n/a|not[ _]set|"
    r"undefined|missing|anonymous|anon|guest|default|other|empty|invalid)[\W_]*"
)


@dataclass(frozen=True)
class Seen:
    """Statistics of a leaf (column or struct field) in a sample of the table.

    Attributes:
        rows, nulls: number of rows (after exploding lists), and of rows without a value.
        values, distinct: number of values and of distinct values; for lists, of elements.
        least, median, largest: statistics of numbers; ``median`` also of durations, in seconds.
        whole: whether all numbers are integers.
        length: mean length of lists, 1 for single values.
        width: common length of all lists that are not empty, else None.
        characters: mean length of texts.
        separator: separator of several ids in a text; ``integers``: whether they are integers.
        most_frequent, most_frequent_rows: the most frequent single value as text, and its rows.
        unit: unit of numbers that may be times, by their range.
        rising: whether numbers seldom decrease from row to row, like times of a log.
        timed: whether texts are times such as 2024-05-01 10:00:00.
        daily: whether all times are dates without an hour.
        infinite: number of values that are infinite as float32.
    """

    leaf: Leaf
    rows: int
    nulls: int
    values: int
    distinct: int
    least: float | None = None
    median: float | None = None
    largest: float | None = None
    whole: bool = False
    length: float = 1.0
    width: int | None = None
    characters: float = 0.0
    separator: str | None = None
    timed: bool = False
    daily: bool = False
    example: str = ""
    infinite: int = 0
    integers: bool = False
    most_frequent: str = ""
    most_frequent_rows: int = 0
    unit: Unit | None = None
    rising: bool = False

    @property
    def dominant_share(self) -> float:
        """Fraction of rows with the most frequent value if it is too frequent for an id, else 0."""
        if self.distinct < 2:
            return 0.0
        share = self.most_frequent_rows / self.rows
        others = (self.values - self.most_frequent_rows) / (self.distinct - 1)
        # The first of ids numbered from 0 is an ordinary id.
        dense = self.whole and not self.has_gaps
        placeholder = not dense and _PLACEHOLDER.fullmatch(self.most_frequent) is not None
        least, ratio = _DOMINANT_PLACEHOLDER if placeholder else _DOMINANT
        return share if share > least and self.most_frequent_rows > ratio * others else 0.0

    @property
    def binary(self) -> bool:
        """Whether the values are bools, or 0 and 1."""
        if pt.is_boolean(plain(self.leaf.type)):
            return True
        return self.distinct == 2 and self.least == 0 and self.largest == 1

    @property
    def unique(self) -> bool:
        """Whether all values are distinct."""
        return self.length == 1 and self.values > 1 and self.distinct == self.values

    @property
    def has_gaps(self) -> bool:
        """Whether integers are so sparse that two unrelated columns would not share values."""
        if self.least is None or self.largest is None:
            return False
        return self.whole and self.largest - self.least > 2 * self.distinct

    @property
    def is_list(self) -> bool:
        return is_list(plain(self.leaf.type))

    @property
    def is_text(self) -> bool:
        return is_text(plain(self.leaf.type))


@dataclass(frozen=True)
class Survey:
    """A sample of a table, with statistics of its columns.

    Attributes:
        location: path or URL of the table.
        rows: number of rows in the sample.
        all_rows: number of rows in the table, or None if unknown.
        seen: statistics of each column and struct field, in order.
        explode: list columns whose elements become rows, such as candidates of a request.
        sample: the rows.
    """

    location: str
    rows: int
    all_rows: int | None
    seen: tuple[Seen, ...]
    explode: tuple[str, ...]
    sample: pa.Table

    @property
    def is_whole(self) -> bool:
        """Whether the sample contains the whole table."""
        return self.all_rows == self.rows

    def determines(self, key: str, name: str) -> bool:
        """Return whether values of ``key`` repeat, and always with the same value of ``name``."""
        if self[key].unique:
            return False
        keys = self._column(key)
        return self.pairs(key, name) == pc.count_distinct(keys, "all").as_py()

    def pairs(self, key: str, name: str) -> int | None:
        """Return the number of distinct pairs of two columns, or None for lists."""
        if self[key].is_list or self[name].is_list:
            return None
        keys, values = self._column(key), self._column(name)
        if len(keys) != len(values):
            return None
        pairs = pa.table({"key": keys, "value": values}).group_by(["key", "value"]).aggregate([])
        return int(pairs.num_rows)

    def share(self, name: str, other: str) -> float:
        """Return the fraction of the elements of ``name`` that also occur in ``other``."""
        values, known = (self.elements(each).cast(pa.string()) for each in (name, other))
        found = pc.is_in(values, value_set=pc.unique(known))
        return float(pc.mean(found.cast(pa.float32())).as_py() or 0)

    def values(self, name: str) -> pa.Array:
        """Return the values of a column, one per row after exploding lists."""
        found = self._column(name)
        return found.dictionary_decode() if pt.is_dictionary(found.type) else found

    def elements(self, name: str) -> pa.Array:
        """Return the non-null values of a column, or the elements of its lists."""
        values = self._column(name)
        if self[name].is_list:
            values = normal(list_parts(values)[1])
        if pt.is_dictionary(values.type):
            values = values.dictionary_decode()
        if (separator := self[name].separator) is not None:
            values = pc.list_flatten(split_text(values, separator))
        return values.drop_null()

    def _column(self, name: str) -> pa.Array:
        return _values(self.sample, self[name].leaf)

    def __getitem__(self, name: str) -> Seen:
        return next(seen for seen in self.seen if seen.leaf.name == name)


def survey(source: Source, explode: Sequence[str] | None = None) -> Survey:
    """Sample the first rows of a table. If ``explode`` is None, detects columns to explode."""
    for problem in explode_problems(source.schema, explode or ()):
        raise DataError(f"{source.location}: {problem}")
    batches, rows, size = [], 0, 0
    for batch in source.batches():
        batches.append(batch.slice(0, _SAMPLE_ROWS - rows))
        rows += batches[-1].num_rows
        size += batches[-1].nbytes
        if rows >= _SAMPLE_ROWS or size >= _SAMPLE_BYTES:
            break
    else:
        if not rows:
            raise DataError(f"{source.location}: the table has no rows. Use a table with rows.")
    table = pa.Table.from_batches(batches).combine_chunks()
    if source.names_in_first_line and _is_data(table):
        raise no_header(source.location, table.schema.names)
    whole = rows if rows < _SAMPLE_ROWS and size < _SAMPLE_BYTES else source.num_rows
    exploded = tuple(_candidates(table) if explode is None else explode)
    seen = [_seen(table, leaf) for leaf in leaves(table.schema, exploded)]
    return Survey(source.location, rows, whole, tuple(seen), exploded, table)


def _is_data(table: pa.Table) -> bool:
    """Return whether the column names of a table look like values of their own columns."""
    names = table.schema.names
    same = [_equals(table.column(name), name) for name in names]
    found = [n for n, each in zip(names, same, strict=True) if pc.any(each).as_py()]
    kinds = {field.name: field.type for field in table.schema}
    of_numbers = [n for n in names if pt.is_integer(kinds[n]) or pt.is_floating(kinds[n])]
    numbers = [n for n in of_numbers if is_number(n)]
    if numbers and all(n in numbers for n in of_numbers if n):
        # Numbers can be names, such as the years of a pivot table.
        return not all(map(is_number, found))
    if 2 * len(found) <= len(names):
        return False
    # Files that were concatenated with their headers repeat all names in one row.
    return not pc.any(functools.reduce(pc.and_, same)).as_py()


def _equals(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    texts = column.cast(pa.string()) if not pt.is_nested(column.type) else column
    return pc.equal(texts, name).fill_null(False)


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    joined = normal(column.combine_chunks() if column.num_chunks != 1 else column.chunk(0))
    return joined.dictionary_decode() if pt.is_dictionary(joined.type) else joined


def _values(table: pa.Table, leaf: Leaf) -> pa.Array:
    column = _column(table, leaf.path[0])
    if leaf.exploded:
        column = list_parts(column)[1]
    return leaf_array(column, leaf)


def _seen(table: pa.Table, leaf: Leaf) -> Seen:
    column = _values(table, leaf)
    is_single = not is_list(plain(leaf.type))
    seen: dict[str, Any] = {"leaf": leaf, "rows": len(column), "nulls": column.null_count}
    values = column
    if not is_single:
        offsets, values, _ = list_parts(column)
        lengths = np.diff(offsets)[column.is_valid().to_numpy(zero_copy_only=False)]
        seen["length"] = float(lengths.mean()) if len(lengths) else 0.0
        filled = lengths[lengths > 0]
        if len(filled) and filled.min() == filled.max():
            seen["width"] = int(filled[0])
    values = normal(values)
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    values = values.drop_null()
    seen |= {"values": len(values), "distinct": 0}
    if pt.is_nested(values.type) or pt.is_null(values.type):
        return Seen(**seen)
    if len(values):
        seen["distinct"] = pc.count_distinct(values).as_py()
        seen["example"] = str(python_value(values[0]))[:40]
    if (numbers := _numbers(values)) is not None:
        seen |= _numeric(numbers, is_single)
        seen["nulls"] += int(np.isnan(numbers).sum()) if is_single else 0
    elif is_span(values.type) and len(values):
        seen["median"] = float(np.quantile(seconds(values), 0.5, method="lower"))
    times = _times(values)
    seen["timed"] = times is not None and is_text(values.type)
    seen["daily"] = seen.get("unit") == "YYYYMMDD" or (
        times is not None and bool(pc.all(pc.equal(times, pc.floor_temporal(times, unit="day"))))
    )
    if is_text(values.type) and len(values):
        seen["characters"] = float(pc.mean(pc.utf8_length(values)).as_py())
        if not seen["timed"] and (separator := _separator(values, seen["characters"])):
            lists = split_text(values, separator)
            parts = normal(pc.list_flatten(lists))
            seen["separator"] = separator
            seen["length"] = float(pc.mean(pc.list_value_length(lists)).as_py())
            seen["distinct"] = pc.count_distinct(parts).as_py()
            seen["integers"] = bool(pc.all(pc.match_substring_regex(parts, _WRITTEN)).as_py())
    if seen["distinct"] and is_single:
        known = values.cast(pa.float64()) if pt.is_decimal(values.type) else values
        known = known.filter(pc.is_finite(known)) if pt.is_floating(known.type) else known
        counts = pc.value_counts(known)
        at = int(np.argmax(counts.field("counts")))
        seen["most_frequent"] = str(python_value(counts.field("values")[at]))
        seen["most_frequent_rows"] = counts.field("counts")[at].as_py()
    return Seen(**seen)


def _numeric(numbers: NDArray[np.float64], is_single: bool) -> dict[str, Any]:
    """Return statistics such as minimum and median, keyed by their attribute of ``Seen``."""
    finite = numbers[np.isfinite(numbers)]
    with np.errstate(over="ignore"):
        endless = ~np.isnan(numbers) & ~np.isfinite(numbers.astype(np.float32))
    found: dict[str, Any] = {"infinite": int(endless.sum())}
    if len(finite) < len(numbers):
        found["distinct"] = len(np.unique(finite))
    if len(finite):
        found |= {
            "least": float(finite.min()),
            "largest": float(finite.max()),
            "median": float(np.quantile(finite, 0.5, method="lower")),
            "whole": bool((finite == np.round(finite)).all()),
            "unit": possible_unit(finite) if is_single else None,
            "rising": len(finite) > 1 and float((np.diff(finite) >= 0).mean()) > _RISING,
        }
    return found


def _numbers(values: pa.Array) -> np.ndarray | None:
    kind = values.type
    if pt.is_decimal(kind):
        values = values.cast(pa.float64())
    elif not (pt.is_integer(kind) or pt.is_floating(kind)):
        return None
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)


def _times(values: pa.Array) -> pa.Array | None:
    """Convert times or texts to timestamps without time zone. Return None for other values."""
    if pt.is_timestamp(values.type) or pt.is_date(values.type):
        return values.cast(pa.timestamp("us"), safe=False)
    if is_text(values.type) and len(values):
        for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
            with suppress(pa.ArrowInvalid):
                return values.slice(0, _LOOKED_AT).cast(kind).cast(pa.timestamp("us"))
    return None


def _separator(texts: pa.Array, characters: float) -> str | None:
    """Return the character that separates ids in many of the texts, or None."""
    distinct = pc.count_distinct(texts).as_py()
    if pc.all(pc.match_substring_regex(texts, _FLAT_LIST)).as_py():
        separator = "," if pc.any(pc.match_substring(texts, ",")).as_py() else " "
        parts = pc.list_flatten(split_text(texts, separator))
        fractions = pc.any(pc.match_substring_regex(parts, _FRACTION)).as_py()
        return separator if len(parts) and not fractions else None
    for separator in _SEPARATORS:
        share = pc.mean(pc.match_substring(texts, separator).cast(pa.float32())).as_py()
        if share < _SEPARATED:
            continue
        parts = pc.list_flatten(split_text(texts, separator))
        length = max(1, len(parts) / len(texts))
        if 2 * pc.count_distinct(parts).as_py() < distinct * min(length, 4) and (
            characters / length < 24
        ):
            return separator
    return None


def _candidates(table: pa.Table) -> list[str]:
    """Return list columns of candidates, detected by a label of 0 and 1 per list element."""
    lengths: dict[str, np.ndarray] = {}
    labels: list[str] = []
    for field in table.schema:
        kind = plain(field.type)
        if not is_list(kind):
            continue
        of = plain(kind.value_type)
        offsets, items, _ = list_parts(_column(table, field.name))
        lengths[field.name] = np.diff(np.asarray(offsets))
        if pt.is_struct(of):
            fields = [normal(pc.struct_field(items, name)) for name in of.names]
            if any(_is_label(values) for values in fields) and len(of.names) > 1:
                return [field.name]
        elif _is_label(items):
            labels.append(field.name)
    for label in labels:
        same = [
            name
            for name, each in lengths.items()
            if name != label and np.array_equal(each, lengths[label])
        ]
        if same and lengths[label].max(initial=0) > 1 and np.ptp(lengths[label]) > 0:
            return [*same, label]
    return []


def _is_label(values: pa.Array) -> bool:
    if pt.is_boolean(values.type):
        return True
    if not pt.is_integer(values.type):
        return False
    seen = set(pc.unique(values.drop_null()).slice(0, 3).to_pylist())
    return bool(seen) and seen <= {0, 1}
