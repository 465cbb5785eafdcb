"""Dataset wrapper ``ranking.negatives``, which adds sampled negatives to training rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from recd_plugin_ranking.items import (
    Int64s,
    Items,
    is_positive,
    item_of_rows,
    kept,
    lists_of,
    row_keys,
    unit_floats,
)
from recd_plugins.api import (
    DataError,
    Dataset,
    DatasetWrapper,
    PluginOptions,
    Reader,
    Rows,
    SetupError,
    Split,
    readers,
    row_tables,
)

# After this many rejected draws, draw from the list of allowed items.
_ATTEMPTS = 16


class DrawnItems:
    """Adds negatives: copies of each row with other items, sampled uniformly or by popularity."""

    def __init__(self, items: Items, label: str, options: Negatives.Options) -> None:
        self._items, self._label, self._options = items, label, options
        self._negatives = options.negatives
        power = options.power if options.by == "popularity" else 0.0
        self._weights = items.counts.astype(np.float64) ** power
        self._until = np.cumsum(self._weights) / self._weights.sum()

    def __call__(self, rows: Rows, epoch: int) -> Rows:
        """Return ``rows``, with the negatives of each row after it."""
        self._check_positive(rows)
        drawn = self._drawn(rows, epoch)
        num_rows, copies = len(rows), self._negatives
        columns = list(self._items.columns)
        own = Rows(rows.data.select(columns), rows.origins)
        others = self._items.rows.take(drawn.ravel())
        order = np.arange(num_rows)[:, None], num_rows + np.arange(drawn.size).reshape(drawn.shape)
        mixed = row_tables.RowTable([own, others]).take(np.concatenate(order, 1).ravel())
        whole = row_tables.RowTable([rows]).take(np.repeat(np.arange(num_rows), copies + 1))
        labels = np.arange(len(whole)) % (copies + 1) == 0
        replaced = {name: mixed.data.column(name) for name in columns}
        replaced[self._label] = pa.array(labels.astype(np.int8)).cast(
            whole.data.schema.field(self._label).type
        )
        # Fields define how lists are stored.
        fields = [
            (mixed if field.name in columns else whole).data.schema.field(field.name)
            for field in whole.data.schema
        ]
        arrays = [replaced.get(field.name, whole.data.column(field.name)) for field in fields]
        data = pa.record_batch(arrays, schema=pa.schema(fields))
        return Rows(data, whole.origins)

    def _drawn(self, rows: Rows, epoch: int) -> Int64s:
        """Draw indices of items as negatives, int64 ``[num_rows, negatives]``."""
        keys = row_keys(rows, self._options.seed, epoch)
        forbidden = self._forbidden(rows)
        row, number = np.divmod(np.arange(len(rows) * self._negatives), self._negatives)
        drawn = np.zeros(len(row), np.int64)
        left = np.arange(len(row))
        for attempt in range(_ATTEMPTS):
            floats = unit_floats(keys[row[left]], attempt * self._negatives + number[left])
            drawn[left] = np.searchsorted(self._until, floats, "right")
            left = left[_among(forbidden, row[left] * len(self._items) + drawn[left])]
        for each in left.tolist():
            drawn[each] = self._allowed(rows, forbidden, int(row[each]), keys, int(number[each]))
        return drawn.reshape(len(rows), self._negatives)

    def _allowed(
        self, rows: Rows, forbidden: Int64s, row: int, keys: NDArray[np.uint64], number: int
    ) -> int:
        """Draw the index of one item that is not excluded for the row."""
        size = len(self._items)
        mine = forbidden[(forbidden >= row * size) & (forbidden < (row + 1) * size)] - row * size
        weights = self._weights.copy()
        weights[mine] = 0
        if not weights.any():
            raise DataError(
                f"{rows.place_of(row)}: all {size} items are excluded from negatives by the row's "
                "item and the option 'never'. Remove a feature from 'never', or remove the row."
            )
        at = number + _ATTEMPTS * self._negatives
        drawn = unit_floats(keys[row : row + 1], np.array([at]))[0] * weights.sum()
        return int(np.searchsorted(np.cumsum(weights), drawn, "right"))

    def _forbidden(self, rows: Rows) -> Int64s:
        """Return ``row * num_items + item index`` of all excluded items, in ascending order."""
        own = item_of_rows(rows, self._options.item), np.ones(len(rows), np.int64)
        pairs = []
        for ids, lengths in (own, *(lists_of(rows, name) for name in self._options.never)):
            places = self._items.places(ids)
            row = np.repeat(np.arange(len(rows)), lengths)
            pairs.append((row * len(self._items) + places)[places >= 0])
        return np.unique(np.concatenate(pairs))

    def _check_positive(self, rows: Rows) -> None:
        if len(wrong := np.flatnonzero(~is_positive(rows, self._label))):
            row = int(wrong[0])
            label = rows.data.column(self._label)[row].as_py()
            raise DataError(
                f"{rows.place_of(row)}: the label is {label}, but every row must be positive. Drop "
                "negative rows in dataset.options, or set by: in_request."
            )


def _among(ascending: Int64s, values: Int64s) -> NDArray[np.bool_]:
    place = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: NDArray[np.bool_] = ascending[place] == values
    return found


_UNIT_ROWS = 2048


class RequestRows:
    """Positive training rows, each followed by unclicked rows of its request, or else session.

    Loads the training split into memory. Omits positive rows of requests without unclicked rows.
    Repeats unclicked rows if a request has fewer than ``negatives`` of them.
    """

    def __init__(
        self, dataset: Dataset, columns: Sequence[str], options: Negatives.Options
    ) -> None:
        keys, label = dataset.session_keys(), dataset.schema().label
        assert keys is not None, "Negatives.prepare() checks it"
        parts, requests, labels = [], [], []
        for rows in row_tables.rows_of_split(dataset, "train"):
            requests.append(_requests(rows, keys.group))
            labels.append(is_positive(rows, label))
            parts.append(Rows(rows.data.select(list(columns)), rows.origins))
        positive = np.concatenate(labels)
        request = pa.concat_arrays(requests).dictionary_encode().indices.to_numpy()
        unclicked = np.flatnonzero(~positive)
        self._unclicked = unclicked[np.argsort(request[unclicked], kind="stable")]
        self._starts = np.r_[
            0, np.cumsum(np.bincount(request[unclicked], minlength=request.max() + 1))
        ]
        clicked = np.flatnonzero(positive)
        clicked = clicked[np.diff(self._starts)[request[clicked]] > 0]
        if not len(clicked):
            raise DataError(
                f"{dataset.name}: no request or session has both a positive and a negative row. "
                "Set by: uniform instead of by: in_request."
            )
        self._clicked, self._request = clicked, request
        self._table = row_tables.RowTable(parts)
        self._negatives, self._seed = options.negatives, options.seed

    def positives(self, *, rank: int, world_size: int, batch_size: int, data: Any) -> Reader:
        """Return a reader with one column, the row indices of the positive rows."""
        units = tuple(
            readers.Unit(0, number, start, min(_UNIT_ROWS, len(self._clicked) - start))
            for number, start in enumerate(range(0, len(self._clicked), _UNIT_ROWS))
        )
        return readers.PlannedReader(
            readers.ReadPlan(units, batch_size),
            self._read,
            data=data,
            what="positive rows with unclicked ones",
            rank=rank,
            world_size=world_size,
            ahead=0,
        )

    def _read(self, pieces: Iterator[readers.Piece]) -> Generator[Rows, None, None]:
        for piece in pieces:
            start = piece.unit.first_row + piece.skip
            places = self._clicked[start : start + piece.num_rows]
            origins = self._table.take(places).origins
            yield Rows(pa.record_batch([pa.array(places)], names=["place"]), origins)

    def __call__(self, positives: Rows, epoch: int) -> Rows:
        """Return the positive rows of ``positives``, each followed by its unclicked rows."""
        places = positives.data.column("place").to_numpy()
        chosen = self._chosen(places, row_keys(positives, self._seed, epoch))
        return self._table.take(np.concatenate([places[:, None], chosen], 1).ravel())

    def _chosen(self, places: Int64s, keys: Any) -> Int64s:
        """Draw unclicked rows of the same request for each positive row, ``[rows, negatives]``."""
        request = self._request[places]
        starts, sizes = self._starts[request], np.diff(self._starts)[request]
        row = np.repeat(np.arange(len(places)), sizes)
        number = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        order = np.lexsort((unit_floats(keys[row], number), row))
        shuffled = (starts[row] + number)[order]
        first = np.cumsum(sizes) - sizes
        picked = first[:, None] + np.arange(self._negatives) % sizes[:, None]
        return self._unclicked[shuffled[picked]]


def _requests(rows: Rows, column: str) -> pa.Array:
    """Return the request of each row in its stored type, because floats could merge large ids."""
    requests = rows.data.column(column)
    if pt.is_dictionary(requests.type):
        requests = requests.dictionary_decode()
    if (empty := requests.is_null(nan_is_null=True).index(True).as_py()) >= 0:
        raise DataError(
            f"{rows.place_of(empty)}: column {column!r} is null, but by: in_request needs the "
            "request. Fill in the value, or set by: uniform."
        )
    return requests


#: Maps rows and the epoch to rows, several per input row.
Expand = Callable[[Rows, int], Rows]


class Negatives(DatasetWrapper):
    """Dataset wrapper that adds sampled negatives with label 0 after each positive training row."""

    name = "ranking.negatives"

    class Options(PluginOptions):
        item: str = Field(description="Item feature with one id per row.")
        with_item: list[str] = Field(
            default=[],
            description="Other sparse or dense features of the item. Negatives copy them from"
            " the first training row with the sampled item.",
        )
        negatives: PositiveInt = Field(
            default=4, description="Number of negatives per positive row."
        )
        by: Literal["uniform", "popularity", "in_request"] = Field(
            default="uniform",
            description="Source of negatives. uniform, popularity: sample items of the training "
            "split, uniformly or by row count. in_request: use unclicked rows (label 0) "
            "of the row's request (or session), unchanged.",
        )
        power: float = Field(
            default=1.0,
            ge=0,
            description="For popularity: exponent of the row count. The result is the "
            "sampling weight.",
        )
        never: list[str] = Field(
            default=[],
            description="Features that list items to exclude from a row's negatives, such as "
            "its history. The row's own item is always excluded.",
        )
        seed: int = Field(default=0, ge=0, lt=1 << 63, description="Seed of the sampled negatives.")

        @model_validator(mode="after")
        def _suit_the_draw(self) -> Self:
            if self.by == "in_request" and (self.with_item or self.never):
                raise ValueError(
                    "by: in_request cannot be combined with the options 'with_item' and 'never'. "
                    "Remove both options"
                )
            return self

    options: Options

    @property
    def rows_together(self) -> int:
        return 1 + self.options.negatives

    def label_mean(self) -> float:
        return 1 / self.rows_together

    def prepare(self) -> None:
        super().prepare()
        options, schema = self.options, self.inner.schema()
        sparse, features = set(schema.sparse), {*schema.sparse, *schema.dense}
        if unknown := ({options.item, *options.never} - sparse) | {*options.with_item} - features:
            raise SetupError(
                f"{self.name}: 'item', 'never' or 'with_item': dataset {self.inner.name!r} has no "
                f"feature '{min(unknown)}'. Use one of: {', '.join(map(repr, sorted(features)))}."
            )
        if schema.tasks:
            raise SetupError(
                f"{self.name}: negatives have one label, but dataset {self.inner.name!r} has the "
                f"labels {', '.join(map(repr, schema.labels))}. Keep one label in option 'label'."
            )
        if options.by == "in_request" and self.inner.session_keys() is None:
            raise SetupError(
                f"{self.name}: by: in_request needs a session column, but dataset "
                f"{self.inner.name!r} has none. Set a session column in dataset.options."
            )

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        """Return a reader that adds negatives to training rows. Test rows are unchanged."""
        ranks = {"rank": rank, "world_size": world_size}
        if split != "train":
            return self.inner.reader(**ranks, batch_size=batch_size, split=split)
        together = self.rows_together
        if batch_size % together:
            below = max(together, batch_size - batch_size % together)
            raise DataError(
                f"{self.name}: a batch of {batch_size} rows is not a multiple of {together} (a "
                f"positive row and its {self.options.negatives} negatives). Set "
                f"training.batch_size to a multiple such as {below}."
            )
        anchors = batch_size // together
        said = {"negatives": readers.digest(self.options.model_dump(mode="json"))}
        if self.options.by != "in_request":
            inner = self.inner.reader(**ranks, batch_size=anchors, split=split)
            return NegativesReader(inner, self._drawn_items, said)
        rows = self._request_rows
        log = self.inner.reader(rank=0, world_size=1, batch_size=1, split=split).state_dict()
        data = {**said, "log": readers.digest(log)}  # the initial state identifies the rows
        return NegativesReader(rows.positives(**ranks, batch_size=anchors, data=data), rows, said)

    @cached_property
    def _drawn_items(self) -> DrawnItems:
        item = self.options.item
        columns = tuple(dict.fromkeys((item, *self.options.with_item)))
        items = kept(self.inner, ("items", columns), lambda: Items.of(self.inner, item, columns))
        return DrawnItems(items, self.inner.schema().label, self.options)

    @cached_property
    def _request_rows(self) -> RequestRows:
        # Columns of a reader, with the session if requested.
        first = next(iter(self.inner.reader(rank=0, world_size=1, batch_size=1, split="train")))
        columns = tuple(first.data.schema.names)
        key = "requests", columns, self.options.negatives, self.options.seed
        return kept(self.inner, key, lambda: RequestRows(self.inner, columns, self.options))


class NegativesReader(Reader):
    """Adds negatives to a reader's batches. ``said`` has the options to store in checkpoints."""

    def __init__(self, inner: Reader, expand: Expand, said: dict[str, Any]) -> None:
        self._inner, self._expand, self._said = inner, expand, said
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Rows]:
        epoch = self._epoch
        for rows in self._inner:
            yield self._expand(rows, epoch)
        self._epoch = epoch + 1

    def blocks(self, worker: int, num_workers: int) -> Iterator[Iterable[Rows]]:
        epoch = self._epoch
        for block in self._inner.blocks(worker, num_workers):
            yield (self._expand(rows, epoch) for rows in block)
        self._epoch = epoch + 1

    def num_blocks(self) -> int | None:
        return self._inner.num_blocks()

    def skip(self, num_batches: int) -> int:
        passed = self._inner.skip(num_batches)
        self._epoch += passed < num_batches
        return passed

    def num_left(self) -> int | None:
        return self._inner.num_left()

    def state_dict(self) -> dict[str, Any]:
        return {**self._said, "epoch": self._epoch, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if any(state.get(name) != value for name, value in self._said.items()):
            raise DataError(
                "the checkpoint was written with other options of 'ranking.negatives'. Restore "
                "these options, or start a new run."
            )
        inner = state["inner"]
        if isinstance(self._expand, RequestRows) and "log" not in inner["data"]:
            # The state of an older version lacks this value.
            log = self._inner.state_dict()["data"]["log"]
            inner = {**inner, "data": {**inner["data"], "log": log}}
        self._inner.load_state_dict(inner)
        self._epoch = state["epoch"]
