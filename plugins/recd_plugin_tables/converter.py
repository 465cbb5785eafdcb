"""Converts rows of a source table to the columns and types that are stored in the import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugin_tables.kinds import (
    ColumnOptions,
    Leaf,
    holds_nothing,
    leaf_array,
    list_parts,
    plain,
)
from recd_plugin_tables.labels import LabelUse, label_numbers, label_weights
from recd_plugin_tables.plan import CANDIDATE, REQUEST, ROW, SESSION, TIME, ColumnPlan, Use
from recd_plugin_tables.values import (
    Cells,
    Texts,
    id_lists,
    ids_of,
    labels_of,
    microseconds,
    missing_id,
    mixed,
    nulls,
    number_rows,
    number_type,
    numbers_of,
)
from recd_plugins.api import DataError, Rows

_LISTS = pa.list_(pa.int64())
OnNan = Literal["error", "drop", "zero"]


class Converter:
    """Converts the columns of a table to the columns of its import.

    Args:
        plan: role of each leaf (a column or a struct field).
        labels: names of the label columns.
        widths: list length of each ``numbers`` feature, keyed by feature name.
        on_nan: how to handle missing or infinite numbers.
        scoring: whether to keep every row and replace missing values by an empty list or 0.
        texts: collects the original text of each hashed id.

    Attributes:
        schema: schema of the import.
        filled: number of missing or infinite values that were replaced, keyed by column.
        empty: number of missing lists and ids that became empty lists, keyed by column.
        without_ids: number of rows whose list of ids is missing or empty, keyed by column.
        dropped: number of rows with a missing value, keyed by column. They are dropped, except
            for scoring.
        unlabelled: number of rows without a label, keyed by label; only of several labels.
        without_candidates: number of table rows whose exploded lists are empty.
    """

    def __init__(
        self,
        plan: ColumnPlan,
        labels: Sequence[str],
        widths: Mapping[str, int],
        on_nan: OnNan,
        *,
        scoring: bool,
        texts: Texts,
    ) -> None:
        self._plan, self._label_names, self._widths = plan, labels, widths
        self._on_nan: OnNan = on_nan
        self._scoring, self._texts = scoring, texts
        self.filled: Counter[str] = Counter()
        self.empty: Counter[str] = Counter()
        self.without_ids: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.unlabelled: Counter[str] = Counter()
        self.without_candidates = 0
        self._left_out: dict[str, NDArray[np.bool_]] = {}
        fields = [pa.field(name, kind) for use in plan.features for name, kind in self._fields(use)]
        fields += [pa.field(name, pa.float32()) for name in labels]
        fields += [pa.field(use.key, plain(use.leaf.type)) for use in plan.keys]
        fields += [pa.field(name, pa.int64()) for name in (SESSION, TIME, REQUEST, ROW, CANDIDATE)]
        self.schema = pa.schema(fields)
        sources = [use.leaf.name for use in plan.features for _ in self._fields(use)]
        sources += [*labels, *(use.leaf.name for use in plan.keys)]
        for name, count in Counter(self.schema.names).items():
            if count > 1:
                named = zip(self.schema.names, sources, strict=False)
                both = " and ".join(repr(source) for other, source in named if other == name)
                raise DataError(
                    f"columns {both} would both be imported as {name!r}. Set the option 'name' of "
                    "one of these columns to another name."
                )

    def convert(self, rows: Rows, first_row: int) -> pa.RecordBatch:
        """Convert rows of the table to rows of the import.

        ``first_row`` is the number of the first of these rows in the table.
        """
        exploded = Exploded(rows, self._plan.explode)
        self.without_candidates += exploded.num_empty
        self._left_out = {}
        arrays: dict[str, pa.Array] = {}
        for use in self._plan.features:
            arrays |= self._feature(use, exploded)
        if self._plan.labels:
            arrays |= {
                use.options.name: self._task_labels(use, exploded) for use in self._plan.labels
            }
        else:
            arrays |= dict.fromkeys(self._label_names, self._labels(exploded))
        for use in self._plan.keys:
            values = leaf_array(exploded.column(use.leaf), use.leaf)
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            arrays[use.key] = exploded.spread(values.cast(plain(use.leaf.type)), use.leaf)
        row = first_row + exploded.parents
        request = self._grouped(self._plan.request, exploded, row)
        session = self._grouped(self._plan.session, exploded, row)
        arrays[REQUEST] = pa.array(row) if request is None else request
        arrays[SESSION] = arrays[REQUEST] if session is None else session
        arrays[TIME] = self._times(exploded, row)
        arrays[ROW], arrays[CANDIDATE] = pa.array(row), pa.array(exploded.numbers)
        made = pa.RecordBatch.from_arrays([arrays[n] for n in self.schema.names], self.schema.names)
        made = made.cast(self.schema)
        self.dropped.update({name: int(every.sum()) for name, every in self._left_out.items()})
        if self._left_out and not self._scoring:
            made = made.filter(pa.array(~np.logical_or.reduce(list(self._left_out.values()))))
        for name in (each.options.name for each in self._plan.labels):
            self.unlabelled[name] += int(np.isnan(made[name].to_numpy()).sum())
        return made

    def _drop(self, use: Use, exploded: Exploded, dropped: NDArray[np.bool_]) -> None:
        if dropped.any():
            every = exploded.spread(pa.array(dropped), use.leaf).to_numpy(zero_copy_only=False)
            # A column may have several uses.
            self._left_out[use.leaf.name] = every | self._left_out.get(use.leaf.name, False)

    def _fields(self, use: Use) -> list[tuple[str, pa.DataType]]:
        if use.options.feature in ("id", "ids"):
            return [(use.name, _LISTS)]
        return [(name, number_type(use.leaf.type)) for name in self._names(use)]

    def _names(self, use: Use) -> list[str]:
        if use.options.feature == "number":
            return [use.name]
        return [f"{use.name}_{n}" for n in range(self._widths[use.name])]

    def _feature(self, use: Use, exploded: Exploded) -> dict[str, pa.Array]:
        cells, options = exploded.cells(use.leaf), use.options
        if options.feature in ("id", "ids"):
            lists, dropped, num_nulls = id_lists(cells, options)
            arrays = {use.name: exploded.spread(lists, use.leaf)}
            if options.missing == "drop":
                num_nulls = 0
            elif options.missing in (None, "empty"):
                num_empty = num_nulls if options.feature == "id" else cells.values.null_count
                self.empty[use.leaf.name] += num_empty
                lengths = pc.list_value_length(arrays[use.name])
                self.without_ids[use.leaf.name] += int(pc.sum(pc.equal(lengths, 0)).as_py() or 0)
                num_nulls -= num_empty
            if options.texts:
                self._texts.add(use.name, cells, options)
        else:
            is_single = options.feature == "number"
            numbers = (
                numbers_of(cells, options)[:, np.newaxis]
                if is_single
                else number_rows(cells, options, self._widths[use.name])
            )
            values, dropped, num_nulls = _finite(cells, numbers, options, self._on_nan)
            arrays = {}
            for index, name in enumerate(self._names(use)):
                column = pa.array(values[:, index]).cast(number_type(use.leaf.type), safe=False)
                arrays[name] = exploded.spread(column, use.leaf)
        self.filled[use.leaf.name] += num_nulls
        self._drop(use, exploded, dropped)
        return arrays

    def _labels(self, exploded: Exploded) -> pa.Array:
        use = self._plan.label
        if use is None:
            return pa.array(np.full(len(exploded.parents), 0 if self._scoring else 1, np.float32))
        cells, missing = exploded.cells(use.leaf), use.options.missing
        numbers = labels_of(cells, use.options)
        gaps = np.isnan(numbers)
        if gaps.any() and missing in (None, "error"):
            raise cells.wrong(
                int(gaps.argmax()),
                "The label is missing. Set missing: drop, 0 or 1 for this column.",
            )
        if missing == "drop":
            self._drop(use, exploded, gaps)
        else:
            self.filled[use.leaf.name] += int(gaps.sum())
        values = np.where(gaps, missing if isinstance(missing, int | float) else 0.0, numbers)
        return exploded.spread(pa.array(values.astype(np.float32)), use.leaf)

    def _task_labels(self, use: LabelUse, exploded: Exploded) -> pa.Array:
        cells, missing = exploded.cells(use.leaf), use.options.missing
        numbers = label_numbers(use, cells)
        gaps = np.isnan(numbers)
        if missing == "error" and gaps.any():
            raise cells.wrong(
                int(gaps.argmax()),
                f"Label {use.options.name!r} is missing. Remove missing: error, so that its loss "
                "and metrics leave out the row.",
            )
        labels = exploded.spread(pa.array(numbers), use.leaf).to_numpy()
        if use.value is not None:
            weights = label_weights(use, exploded.cells(use.value))
            spread = exploded.spread(pa.array(weights), use.value).to_numpy()
            labels = np.where(labels > 0, spread, labels)
        gaps = np.isnan(labels)
        if missing == "drop" and gaps.any():
            self._left_out[use.leaf.name] = gaps | self._left_out.get(use.leaf.name, False)
        elif isinstance(missing, float):
            self.filled[use.leaf.name] += int(gaps.sum())
            labels = np.where(gaps, missing, labels)
        return pa.array(labels.astype(np.float32))

    def _grouped(
        self, use: Use | None, exploded: Exploded, row: NDArray[np.int64]
    ) -> pa.Array | None:
        """Return each row's session or request id (unique if null); None without such a column."""
        if use is None:
            return None
        cells = exploded.cells(use.leaf)
        ids = ids_of(cells, ColumnOptions.model_validate({"as": "session"}))
        if ids.null_count and use.options.missing in (None, "empty"):
            if use.options.feature is None:
                self.filled[use.leaf.name] += ids.null_count
            spread = exploded.spread(ids, use.leaf)
            return pc.coalesce(spread, pa.array(mixed(row).view(np.int64)))
        return self._without_nulls(use, exploded, cells, ids)

    def _times(self, exploded: Exploded, row: NDArray[np.int64]) -> pa.Array:
        use = self._plan.time
        if use is None:
            return pa.array(row)
        cells = exploded.cells(use.leaf)
        return self._without_nulls(use, exploded, cells, microseconds(cells, use.options.unit))

    def _without_nulls(self, use: Use, exploded: Exploded, cells: Cells, ids: pa.Array) -> pa.Array:
        if ids.null_count:
            empty, missing = nulls(ids), use.options.missing
            if missing in (None, "error", "empty") and not self._scoring:
                roles = " and ".join(map(repr, use.options.roles))
                value = "" if "time" in use.options.roles else " or to a replacement value"
                raise cells.wrong(
                    int(empty.argmax()),
                    f"A column with role {roles} cannot have missing values. Set option 'missing' "
                    f"of the column to 'drop'{value}.",
                )
            if missing == "drop":
                self._drop(use, exploded, empty)
            elif use.options.feature is None:
                self.filled[use.leaf.name] += int(empty.sum())
            ids = ids.fill_null(missing_id(missing))
        return exploded.spread(ids, use.leaf)


class Exploded:
    """Rows of a table after exploding lists: each list element becomes a row."""

    def __init__(self, rows: Rows, columns: Sequence[str]) -> None:
        self._rows = rows
        self._items: dict[str, pa.Array] = {}
        self.parents = np.arange(len(rows))
        self.numbers = np.zeros(len(rows), np.int64)
        self.num_empty = 0
        lengths = None
        for name in columns:
            offsets, self._items[name], _ = list_parts(rows.data[name])
            found = np.diff(offsets)
            lengths = found if lengths is None else lengths
            if (found != lengths).any():
                row = int((found != lengths).argmax())
                path, row_in_file = rows.origin_of(row)
                raise DataError(
                    f"{path}: row {row_in_file} (from 0) has {found[row]} elements in column "
                    f"{name!r} but {lengths[row]} in {columns[0]!r}. Make these lists equally "
                    "long, or remove one of the columns from the option 'explode'."
                )
        if lengths is not None:
            self.parents = np.repeat(self.parents, lengths)
            starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
            self.numbers = (np.arange(len(self.parents)) - starts[self.parents]).astype(np.int64)
            self.num_empty = int((lengths == 0).sum())

    def column(self, leaf: Leaf) -> pa.Array:
        """Return the values of a column or struct field, or its list elements if exploded."""
        return self._items[leaf.path[0]] if leaf.exploded else self._rows.data[leaf.path[0]]

    def cells(self, leaf: Leaf) -> Cells:
        """Return the values of a column or struct field, with locations for error messages."""

        def place(index: int) -> str:
            row = int(self.parents[index]) if leaf.exploded else index
            path, row_in_file = self._rows.origin_of(row)
            candidate = f", candidate {self.numbers[index]}" if leaf.exploded else ""
            return f"{path}: row {row_in_file} (from 0){candidate}, column {leaf.name!r}"

        values = leaf_array(self.column(leaf), leaf)
        return Cells(values.cast(leaf.type) if holds_nothing(values.type) else values, place)

    def spread(self, values: pa.Array, leaf: Leaf) -> pa.Array:
        """Repeat each value of a column that is not exploded for all rows exploded from it."""
        return values if leaf.exploded or not self._items else values.take(pa.array(self.parents))


def _finite(
    cells: Cells, numbers: NDArray[np.float64], options: ColumnOptions, on_nan: OnNan
) -> tuple[NDArray[Any], NDArray[np.bool_], int]:
    """Replace NaN and infinity in ``numbers`` ``[B, width]`` as the options say.

    Returns:
        The replaced numbers, the rows to drop (bool ``[B]``), and the count of NaN and infinity in
        other rows.
    """
    gaps = np.isnan(numbers)
    with np.errstate(over="ignore"):
        infinite = ~gaps & ~np.isfinite(numbers.astype(np.float32))
    rule = on_nan if options.missing is None else options.missing
    values = numbers.copy()
    dropped = np.zeros(len(cells), np.bool_)
    for wrong, how in ((gaps, rule), (infinite, on_nan)):
        in_row = wrong.any(axis=1)
        if how == "error" and in_row.any():
            remedy = (
                "The number is missing. Set option 'missing' of the column to 'drop' or a number "
                "before training, or add the argument dataset.options.on_nan=zero (or drop)."
                if wrong is gaps
                else "Features must be finite float32 numbers. Correct the value, or add the "
                "argument dataset.options.on_nan=zero (or drop)."
            )
            raise cells.wrong(int(in_row.argmax()), remedy)
        if how == "drop":
            dropped |= in_row
        values[wrong] = how if isinstance(how, int | float) else 0.0
    return values, dropped, int((gaps | infinite)[~dropped].sum())
