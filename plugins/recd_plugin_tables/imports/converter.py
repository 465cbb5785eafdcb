"""Rows of a table as rows for a model: typed columns, exploded, of finite numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugin_tables.columns import ColumnOptions
from recd_plugin_tables.kinds import Leaf, leaf_array, list_parts, plain
from recd_plugin_tables.plan import CANDIDATE, REQUEST, ROW, SESSION, TIME, ColumnPlan, Use
from recd_plugin_tables.times import Cells, microseconds, nulls
from recd_plugin_tables.values import (
    Texts,
    id_lists,
    ids_of,
    labels_of,
    missing_id,
    mixed,
    number_rows,
    number_type,
    numbers_of,
)
from recd_plugins.api import DataError, Rows

_LISTS = pa.list_(pa.int64())


class Converter:
    """Makes the columns of an import from those of a table.

    Args:
        plan: which leaf is what.
        label: name of the column of the label.
        widths: how many numbers the lists of a feature hold, by its name.
        on_nan: what becomes of dense values that are no finite number.
        scoring: every row stays, as if what is missing were empty or 0.
        texts: keeps the text of ids; None where none is asked for.

    Attributes:
        schema: of what ``convert`` returns.
        filled: values that were missing, or no number, by column.
        dropped: rows that were left out for it, by column; when scoring, that would have been.
        without_candidates: rows of the table that have no candidate to make a row of.
    """

    def __init__(
        self,
        plan: ColumnPlan,
        label: str,
        widths: Mapping[str, int],
        on_nan: OnNan,
        *,
        scoring: bool = False,
        texts: Texts | None = None,
    ) -> None:
        self._plan, self._label, self._widths = plan, label, widths
        self._on_nan: OnNan = on_nan
        self._scoring, self._texts = scoring, texts
        self.filled: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.without_candidates = 0
        fields = [pa.field(name, kind) for use in plan.features for name, kind in self._fields(use)]
        fields.append(pa.field(label, pa.float32()))
        fields += [pa.field(use.key, plain(use.leaf.type)) for use in plan.keys]
        fields += [pa.field(name, pa.int64()) for name in (SESSION, TIME, REQUEST, ROW, CANDIDATE)]
        self.schema = pa.schema(fields)
        for name in self.schema.names:
            if self.schema.names.count(name) > 1:
                raise DataError(f"two columns would be called {name}; set name: of one")

    def convert(self, rows: Rows, first_row: int) -> pa.RecordBatch:
        """Rows of the import.

        Args:
            rows: of the table, with ``plan.columns``.
            first_row: the number of the first of them in the table.
        """
        exploded = explode(rows, self._plan.explode)
        self.without_candidates += exploded.num_empty
        arrays: dict[str, pa.Array] = {}
        left_out: dict[str, NDArray[np.bool_]] = {}

        def drop(use: Use, dropped: NDArray[np.bool_]) -> None:
            if dropped.any():
                name, every = use.leaf.name, exploded.spread(dropped, use.leaf)
                # A column may have several uses.
                left_out[name] = left_out[name] | every if name in left_out else every

        for use in self._plan.features:
            self._feature(use, exploded, arrays, drop)
        arrays[self._label] = self._labels(exploded, drop)
        for use in self._plan.keys:
            values = leaf_array(exploded.column(use.leaf), use.leaf)
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            arrays[use.key] = exploded.spread_array(values.cast(plain(use.leaf.type)), use.leaf)
        row = first_row + exploded.parents
        request = self._grouped(self._plan.request, exploded, row, drop)
        session = self._grouped(self._plan.session, exploded, row, drop)
        arrays[REQUEST] = pa.array(row) if request is None else request
        arrays[SESSION] = arrays[REQUEST] if session is None else session
        arrays[TIME] = self._times(exploded, row, drop)
        arrays[ROW], arrays[CANDIDATE] = pa.array(row), pa.array(exploded.numbers)
        made = pa.RecordBatch.from_arrays([arrays[n] for n in self.schema.names], self.schema.names)
        made = made.cast(self.schema)
        self.dropped.update({name: int(every.sum()) for name, every in left_out.items()})
        if self._scoring or not left_out:
            return made
        return made.filter(pa.array(~np.logical_or.reduce(list(left_out.values()))))

    def _fields(self, use: Use) -> list[tuple[str, pa.DataType]]:
        if use.options.feature in ("id", "ids"):
            return [(use.name, _LISTS)]
        return [(name, number_type(use.leaf.type)) for name in self._names(use)]

    def _names(self, use: Use) -> list[str]:
        return number_names(use.name, use.options, self._widths)

    def _feature(
        self,
        use: Use,
        exploded: Exploded,
        arrays: dict[str, pa.Array],
        drop: Callable[[Use, NDArray[np.bool_]], None],
    ) -> None:
        cells, options = exploded.cells(use.leaf), use.options
        if options.feature in ("id", "ids"):
            lists, dropped, num_nulls = id_lists(cells, options)
            if options.texts and self._texts is not None:
                self._texts.add(use.name, cells, options)
            arrays[use.name] = exploded.spread_array(lists, use.leaf)
        else:
            numbers = (
                number_rows(cells, options, self._widths[use.name])
                if options.feature == "numbers"
                else numbers_of(cells, options)
            )
            kept = finite(cells, numbers, options, self._on_nan)
            dropped, num_nulls = kept.dropped, kept.num_filled
            values = kept.values if kept.values.ndim == 2 else kept.values[:, np.newaxis]
            for index, name in enumerate(self._names(use)):
                column = pa.array(values[:, index]).cast(number_type(use.leaf.type), safe=False)
                arrays[name] = exploded.spread_array(column, use.leaf)
        self.filled[use.leaf.name] += num_nulls
        drop(use, dropped)

    def _labels(
        self, exploded: Exploded, drop: Callable[[Use, NDArray[np.bool_]], None]
    ) -> pa.Array:
        use = self._plan.label
        if use is None:
            return pa.array(np.full(len(exploded), 0 if self._scoring else 1, np.float32))
        cells = exploded.cells(use.leaf)
        numbers = labels_of(cells, use.options)
        kept = given(cells, numbers, use.options)
        self.filled[use.leaf.name] += kept.num_filled
        drop(use, kept.dropped)
        return exploded.spread_array(pa.array(kept.values.astype(np.float32)), use.leaf)

    def _grouped(
        self,
        use: Use | None,
        exploded: Exploded,
        row: NDArray[np.int64],
        drop: Callable[[Use, NDArray[np.bool_]], None],
    ) -> pa.Array | None:
        """Ids that are equal in rows of one session or request; a row without is one of its own."""
        if use is None:
            return None
        cells = exploded.cells(use.leaf)
        ids = ids_of(cells, ColumnOptions.model_validate({"as": "session"}))
        if ids.null_count and use.options.missing in (None, "empty"):
            if use.options.feature is None:
                self.filled[use.leaf.name] += ids.null_count
            spread = exploded.spread_array(ids, use.leaf)
            return pc.coalesce(spread, pa.array(mixed(row).view(np.int64)))
        return exploded.spread_array(self._without_nulls(use, cells, ids, drop), use.leaf)

    def _times(
        self,
        exploded: Exploded,
        row: NDArray[np.int64],
        drop: Callable[[Use, NDArray[np.bool_]], None],
    ) -> pa.Array:
        use = self._plan.time
        if use is None:
            return pa.array(row)
        cells = exploded.cells(use.leaf)
        times = microseconds(cells, use.options.unit)
        return exploded.spread_array(self._without_nulls(use, cells, times, drop), use.leaf)

    def _without_nulls(
        self,
        use: Use,
        cells: Cells,
        ids: pa.Array,
        drop: Callable[[Use, NDArray[np.bool_]], None],
    ) -> pa.Array:
        if not ids.null_count:
            return ids
        empty, missing = nulls(ids), use.options.missing
        if missing in (None, "error", "empty") and not self._scoring:
            roles = " and ".join(use.options.roles)
            value = "" if "time" in use.options.roles else ", or a value for it"
            raise cells.wrong(
                int(empty.argmax()), f"the column is {roles}; set missing: drop{value}"
            )
        if use.options.feature is None:
            self.filled[use.leaf.name] += int(empty.sum())
        if missing == "drop":
            drop(use, empty)
        return ids.fill_null(missing_id(missing))


def number_names(name: str, options: ColumnOptions, widths: Mapping[str, int]) -> list[str]:
    """Return the dense features of one column."""
    return [name] if options.feature == "number" else [f"{name}_{n}" for n in range(widths[name])]


class Exploded:
    """Rows of a table, and of each some rows for a model.

    What is not exploded is made once a row of the table, and spread.

    Attributes:
        parents: the row of the table that each row is of, int64 ``[num_rows]``, from 0.
        numbers: which candidate of it, from 0.
        num_empty: rows of the table without candidates.
    """

    def __init__(
        self,
        rows: Rows,
        parents: NDArray[np.int64],
        numbers: NDArray[np.int64],
        items: dict[str, pa.Array],
        num_empty: int,
    ) -> None:
        self._rows, self._items = rows, items
        self.parents, self.numbers, self.num_empty = parents, numbers, num_empty

    def __len__(self) -> int:
        return len(self.parents)

    def column(self, leaf: Leaf) -> pa.Array:
        """The column of a leaf: of the table's rows, or of candidates where it is exploded."""
        return self._items[leaf.path[0]] if leaf.exploded else self._rows.data[leaf.path[0]]

    def cells(self, leaf: Leaf) -> Cells:
        """The values of a leaf in that column."""

        def place(index: int) -> str:
            return self.place(index, leaf.name, of_candidates=leaf.exploded)

        return Cells(leaf_array(self.column(leaf), leaf), place)

    def place(self, index: int, column: str, *, of_candidates: bool = True) -> str:
        """File, row and column for an error message, and the candidate where there are some."""
        row = int(self.parents[index]) if of_candidates else index
        path, row_in_file = self._rows.origin_of(row)
        candidate = f", candidate {self.numbers[index]}" if of_candidates and self._items else ""
        return f"{path}: row {row_in_file} (from 0){candidate}, column {column!r}"

    def spread(self, values: NDArray[Any], leaf: Leaf) -> NDArray[Any]:
        """Values of a leaf's column for each row."""
        return values if leaf.exploded or not self._items else values[self.parents]

    def spread_array(self, values: pa.Array, leaf: Leaf) -> pa.Array:
        """The same of Arrow."""
        return values if leaf.exploded or not self._items else values.take(pa.array(self.parents))


def explode(rows: Rows, columns: Sequence[str]) -> Exploded:
    """A row for each element of the lists in ``columns``, which are parallel; none: the rows."""
    num_rows = len(rows)
    if not columns:
        return Exploded(rows, np.arange(num_rows), np.zeros(num_rows, np.int64), {}, 0)
    items, lengths = {}, None
    for name in columns:
        offsets, items[name], _ = list_parts(rows.data[name])
        found = np.diff(offsets)
        lengths = found if lengths is None else lengths
        if (found != lengths).any():
            row = int((found != lengths).argmax())
            path, row_in_file = rows.origin_of(row)
            raise DataError(
                f"{path}: row {row_in_file} (from 0): {found[row]} elements in column {name} and "
                f"{lengths[row]} in {columns[0]}; columns that are exploded together are parallel"
            )
    assert lengths is not None
    parents = np.repeat(np.arange(num_rows), lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    numbers = np.arange(len(parents)) - starts[parents] if len(parents) else parents
    return Exploded(rows, parents, numbers.astype(np.int64), items, int((lengths == 0).sum()))


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
) -> Kept:
    """Numbers of a dense feature, finite as float32.

    Args:
        cells: the column, for errors.
        numbers: ``[B]`` or ``[B, width]``, NaN where a value is missing.
        options: its ``missing`` is for null and NaN, in place of ``on_nan``.
        on_nan: for what is missing, and for what is infinite as float32.
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
            raise cells.wrong(int(in_row.argmax()), _MISSING)
        if how == "drop":
            dropped |= in_row
        values[wrong] = how if isinstance(how, int | float) else 0.0
    return Kept(values, dropped, int(gaps.sum() + endless.sum()))


def given(cells: Cells, numbers: NDArray[np.float64], options: ColumnOptions) -> Kept:
    """Labels, NaN where there is none, after ``missing``."""
    gaps = np.isnan(numbers)
    if gaps.any() and options.missing in (None, "error"):
        raise cells.wrong(int(gaps.argmax()), "set missing: drop, 0 or 1 for it")
    drops = options.missing == "drop"
    fill = 0.0 if drops or not isinstance(options.missing, int | float) else options.missing
    none = np.zeros_like(gaps)
    return Kept(np.where(gaps, fill, numbers), gaps if drops else none, int(gaps.sum()))


_MISSING = (
    "features are finite numbers of 32 bits; set missing: of this column to a value (for null and "
    "NaN), or on_nan: of the dataset to drop or zero"
)
