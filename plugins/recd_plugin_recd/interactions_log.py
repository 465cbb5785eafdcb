"""Reads interaction logs in CSV-like files, and computes the features of their events.

Events are sorted by time, then by file order. The user features of an event are computed from the
user's events before the *anchor*. The anchor is the event itself, or the first event of its request
or session. Item features are computed from earlier events. No row uses its own outcome or later
events.

In a log to be scored, an event with unknown outcome is a candidate. Its features are those that a
new event of the user at this time would have. It does not influence other rows.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from recd_plugins.api import DataError

Int64s = NDArray[np.int64]
Refresh = Literal["event", "request", "session"]

SEPARATORS = {".inter": "\t", ".tsv": "\t", ".csv": ",", ".dat": "::", ".data": "\t"}
#: MovieLens files without a header line, and their columns.
WITHOUT_HEADER = (".dat", ".data")
DEFAULT_NAMES = ["user_id", "item_id", "rating", "timestamp"]
#: Value types of id columns.
NUMBERS, TEXT = "numbers", "text"

# Arrow accepts a single byte. Text does not contain this one.
_UNIT_SEPARATOR = "\x1f"
_RECBOLE_TYPE = re.compile(r":(token|float)(_seq)?$")
# No leading zeros: 7 and 07 are different ids.
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class Format:
    """Format of a log file.

    Attributes:
        separator: column separator, one or more characters.
        names: column names.
        has_header: whether the first line is a header.
    """

    separator: str
    names: tuple[str, ...]
    has_header: bool


@dataclass(frozen=True)
class Events:
    """The interactions of a log, in file order. All arrays are ``[num_events]``.

    Attributes:
        users, items: int64 ids. Integer ids are unchanged; columns with other ids are hashed.
        outcomes: float64 values or labels; NaN if unknown.
        times: float64 times.
        kinds: maps each id column to ``numbers`` or ``text``.
    """

    users: Int64s
    items: Int64s
    outcomes: NDArray[np.float64]
    times: NDArray[np.float64]
    kinds: Mapping[str, str] = field(default_factory=dict)


def detect_format(path: Path, separator: str | None, header: bool | Sequence[str] | None) -> Format:
    """Return the format of a file. Options that are None are derived from the file.

    Raises DataError if the file does not exist, or its suffix has no default separator.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: the file does not exist (current folder: {Path.cwd()}). Check the option "
            "'path'. MovieLens files are at https://files.grouplens.org/datasets/movielens/"
        )
    if separator is None:
        separator = SEPARATORS.get(path.suffix.lower())
        if separator is None:
            raise DataError(
                f"{path}: the column separator of this file type is unknown. Set the option "
                f"'separator', or run recd init {path} my.yaml for JSON lines, Parquet and others."
            )
    if header is None:
        header = path.suffix.lower() not in WITHOUT_HEADER
    if header is True:
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            first = lines.readline().rstrip("\r\n")
        names = next(csv.reader([first])) if separator == "," else first.split(separator)
        return Format(separator, tuple(_RECBOLE_TYPE.sub("", name.strip()) for name in names), True)
    return Format(separator, tuple(header or DEFAULT_NAMES), False)


def read_events(
    path: Path,
    layout: Format,
    *,
    user: str,
    item: str,
    outcome: str,
    timestamp: str,
    outcome_option: str = "label",
    kinds: Mapping[str, str] | None = None,
) -> Events:
    """Read all events of a log.

    Args:
        path: the file.
        layout: format of the file.
        user, item, outcome, timestamp: names of the columns.
        outcome_option: option that names the column ``outcome``, for error messages.
        kinds: dict from id column to its type in the training log, if this log is to be scored. Its
            outcomes may be empty. None for a training log.

    Raises:
        DataError: a column is missing or contains a wrong value.
    """
    wanted = {"user": user, "item": item, "timestamp": timestamp, outcome_option: outcome}
    for option, name in wanted.items():
        if layout.names.count(name) != 1:
            advice = f"Use one of: {', '.join(map(repr, layout.names))}."
            if kinds is not None and name == outcome:
                advice = "Add the column, with empty values for unknown outcomes."
            wrong = "which the table does not have"
            if name in layout.names:
                wrong = "but several columns have this name"
            raise DataError(f"{path}: option {option!r} names column {name!r}, {wrong}. {advice}")
    if len(set(wanted.values())) < len(wanted):
        raise DataError(
            f"{path}: two of the options 'user', 'item', 'timestamp', 'value' and 'label' name the "
            "same column. Set each option to a different column."
        )
    known = kinds or {}
    try:
        table = _read(path, layout, (user, item), (outcome, timestamp))
        outcomes = _numbers(table, outcome, may_be_empty=kinds is not None)
        times = _numbers(table, timestamp, may_be_empty=False)
        found = {name: _ids(table, name, known.get(name)) for name in (user, item)}
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{path}: the file cannot be parsed ({error}). Correct the value, or set the option "
            "'separator'."
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    for name, (_, kind) in found.items():
        if known.get(name, kind) != kind:
            raise DataError(
                f"{path}: column {name!r} contains text, but contains whole numbers in the "
                "training log. Use the same ids as in the training log."
            )
    if not table.num_rows:
        raise DataError(f"{path}: the file has no interactions. Use a file with at least one row.")
    users, items = (ids for ids, _ in found.values())
    return Events(users, items, outcomes, times, {name: kind for name, (_, kind) in found.items()})


def _read(path: Path, layout: Format, ids: Sequence[str], numbers: Sequence[str]) -> pa.Table:
    types: Mapping[str, pa.DataType] = {
        **{name: pa.dictionary(pa.int32(), pa.string()) for name in ids},
        **{name: pa.float64() for name in numbers},
    }
    source: object = path
    delimiter, quotes = layout.separator, layout.separator == ","
    if len(delimiter) > 1:
        content = path.read_bytes().replace(delimiter.encode(), _UNIT_SEPARATOR.encode())
        source, delimiter = pa.BufferReader(content), _UNIT_SEPARATOR
    return pa_csv.read_csv(
        source,
        read_options=pa_csv.ReadOptions(
            column_names=list(layout.names), skip_rows=int(layout.has_header), use_threads=False
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=delimiter,
            quote_char='"' if quotes else False,
            newlines_in_values=quotes,
        ),
        convert_options=pa_csv.ConvertOptions(column_types=types, include_columns=[*ids, *numbers]),
    )


def _numbers(table: pa.Table, name: str, *, may_be_empty: bool) -> NDArray[np.float64]:
    values: NDArray[np.float64] = table[name].to_numpy()
    wrong = ~np.isfinite(values)
    if may_be_empty:
        wrong &= table[name].is_valid().to_numpy()
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"column {name!r}, row {row} (from 0): the number is missing or not finite. Fill in a "
            "number, or remove the row."
        )
    return values


def _ids(table: pa.Table, name: str, known: str | None) -> tuple[Int64s, str]:
    """Return the ids of a column, int64 ``[num_events]``, and their type.

    The type is ``numbers`` or ``text``. ``known`` is the type in the training log, or None.
    """
    encoded = table[name].unify_dictionaries().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0)
    names = encoded.dictionary.to_pylist()
    if encoded.null_count or not all(names):
        raise ValueError(f"column {name!r}: an id is empty. Fill in the id, or remove the row.")
    whole = known != TEXT and all(_WHOLE_NUMBER.fullmatch(name) for name in names)
    ids = [int(name) if whole else _hash(name) for name in names]
    return np.array(ids, np.int64)[np.asarray(encoded.indices)], NUMBERS if whole else TEXT


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


SPARSE = (
    "user_id", "item_id", "history_seen", "history_liked", "history_disliked", "hour",
)  # fmt: skip
DENSE = (
    "user_seen", "user_liked_share", "user_idle", "item_seen", "item_liked_share",
)  # fmt: skip
LABEL = "label"
SESSION, TIMESTAMP = "session_id", "timestamp"

_IDS = pa.list_(pa.int64())
SCHEMA = pa.schema(
    [
        *((name, _IDS) for name in SPARSE),
        *((name, pa.float32()) for name in DENSE),
        (LABEL, pa.int8()),
    ]
)


class InteractionLog:
    """Computes the features of events. *Places* are indices of events sorted by user and time.

    Args:
        events: the interactions; ``outcomes`` are not used.
        liked: whether each event was positive, bool ``[num_events]``.
        session_gap: seconds without events after which a new session starts.
        refresh: when user features are updated: ``event``, ``request`` or ``session``.
        impressions: number of events per request.
        history: maximum number of items in a history.
        own_anchors: the last ``own_anchors`` events of each user get user features of all earlier
            events. Other events get features of the events before the last refresh.
        known: whether each event's outcome is known, bool ``[num_events]``; None if all are.
    """

    def __init__(
        self,
        events: Events,
        liked: NDArray[np.bool_],
        *,
        session_gap: float,
        refresh: Refresh,
        impressions: int,
        history: int,
        own_anchors: int = 0,
        known: NDArray[np.bool_] | None = None,
    ) -> None:
        self._history = history
        known = np.ones(len(liked), bool) if known is None else known
        by_time = np.argsort(events.times, kind="stable")
        by_user = np.argsort(events.users[by_time], kind="stable")
        order = by_time[by_user]

        #: Time rank and file row of the event at each place.
        self.ranks: Int64s = by_user
        self.file_rows: Int64s = order
        self._users = events.users[order]
        self._items = events.items[order]
        self._times = events.times[order]
        #: Whether the event at each place was positive.
        self.liked: NDArray[np.bool_] = liked[order]

        new_user = _changes(self._users)
        gaps = np.diff(self._times, prepend=self._times[:1])
        #: First place of each event's session.
        self.session_starts: Int64s = _start_of_run(new_user | (gaps > session_gap))

        # From here on indices count known events alone; where all are known they are places. The
        # index of a candidate is that of the known event behind it.
        known = known[order]
        self._index: Int64s = np.cumsum(known) - known
        self._starts: Int64s = self._index[_start_of_run(new_user)]
        self._known_items = self._items[known]
        # One extra entry, for indices before the first or behind the last event.
        self._known_times = np.append(self._times[known], 0)
        self._is_first: NDArray[np.bool_] = self._index == self._starts
        pauses = self._times - self._known_times[self._index - 1]
        new_session = self._is_first | (pauses > session_gap)
        sessions = np.append(_start_of_run(new_session[known]), 0)
        started = np.where(new_session, self._index, sessions[self._index - 1])
        #: For each event, the event at which its user features were last refreshed.
        self.anchors: Int64s = {
            "event": self._index,
            "request": self._index - (self._index - started) % impressions,
            "session": started,
        }[refresh]
        # Counted from the user's last event, which has number 1.
        counts = np.append(self._index, known.sum())
        ends = np.append(np.flatnonzero(new_user)[1:], len(order))
        ends = np.repeat(counts[ends], np.diff(ends, prepend=0))
        self._from_last: Int64s = ends - self._index + ~known
        self.anchors = np.where(self._from_last <= own_anchors, self._index, self.anchors)

        known_liked = self.liked[known]
        self._num_liked: Int64s = np.append(0, np.cumsum(known_liked))
        self._liked_items = self._known_items[known_liked]
        self._disliked_items = self._known_items[~known_liked]
        self._item_seen, self._item_liked = self._item_counts(events.items[by_time], by_user, known)

    def __len__(self) -> int:
        return len(self._users)

    def is_last(self, nth: int) -> NDArray[np.bool_]:
        """Return whether each event is its user's ``nth`` last event, and not the user's first.

        The result is bool ``[num_events]``.
        """
        return (self._from_last == nth) & ~self._is_first

    def rows(self, places: Int64s) -> pa.RecordBatch:
        """Return training rows of the events at these indices in the order of user and time."""
        anchors, starts = self.anchors[places], self._starts[places]
        liked_stop, liked_start = self._num_liked[anchors], self._num_liked[starts]
        disliked_stop, disliked_start = anchors - liked_stop, starts - liked_start
        seen, liked = anchors - starts, liked_stop - liked_start
        item_seen, item_liked = self._item_seen[places], self._item_liked[places]
        own = anchors == self._index[places]
        at = np.where(own, self._times[places], self._known_times[anchors])
        # A user's first event has no previous event and no idle time.
        idle = np.where(seen > 0, at - self._known_times[anchors - 1], 0)
        hours = (at // 3600 % 24).astype(np.int64)
        columns = [
            _one_each(self._users[places]),
            _one_each(self._items[places]),
            self._last(self._known_items, starts, anchors),
            self._last(self._liked_items, liked_start, liked_stop),
            self._last(self._disliked_items, disliked_start, disliked_stop),
            _one_each(hours),
            *(
                column.astype(np.float32)
                for column in (
                    np.log1p(seen),
                    _share(liked, seen),
                    np.log1p(idle / 60),
                    np.log1p(item_seen),
                    _share(item_liked, item_seen),
                )
            ),
            self.liked[places].astype(np.int8),
        ]
        return pa.record_batch(columns, schema=SCHEMA)

    def rows_with_keys(self, places: Int64s) -> pa.RecordBatch:
        """Return the result of ``rows`` plus the columns session number and time (microseconds)."""
        rows = self.rows(places)
        keys = {
            SESSION: self.session_starts[places],
            TIMESTAMP: np.rint(self._times[places] * 1e6).astype(np.int64),
        }
        return pa.record_batch(
            [*rows.columns, *keys.values()],
            schema=pa.schema([*SCHEMA, *((name, pa.int64()) for name in keys)]),
        )

    def _item_counts(
        self, items: Int64s, by_user: Int64s, known: NDArray[np.bool_]
    ) -> tuple[Int64s, Int64s]:
        """Return how often each event's item was viewed, and liked, earlier: two int64 ``[n]``."""
        by_item = np.argsort(items, kind="stable")
        starts = _start_of_run(_changes(items[by_item]))
        counts = []
        for counted in (known, known & self.liked):
            by_time = np.empty(len(items), bool)
            by_time[by_user] = counted
            before = np.cumsum(by_time[by_item]) - by_time[by_item]
            count = np.empty_like(by_item)
            count[by_item] = before - before[starts]
            counts.append(count[by_user])
        return counts[0], counts[1]

    def _last(self, items: Int64s, starts: Int64s, stops: Int64s) -> pa.ListArray:
        """Return the last ``history`` items of ``items[start:stop]`` per row, as a list column."""
        starts = np.maximum(starts, stops - self._history)
        offsets = np.zeros(len(starts) + 1, np.int32)
        np.cumsum(stops - starts, out=offsets[1:])
        index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], stops - starts)
        return pa.ListArray.from_arrays(offsets, items[index])


def _changes(values: Int64s) -> NDArray[np.bool_]:
    changed = np.ones(len(values), bool)
    changed[1:] = values[1:] != values[:-1]
    return changed


def _start_of_run(starts: NDArray[np.bool_]) -> Int64s:
    """Return the index of the last True at or before each element, int64."""
    return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))


def _one_each(ids: Int64s) -> pa.ListArray:
    return pa.ListArray.from_arrays(np.arange(len(ids) + 1, dtype=np.int32), ids)


def _share(part: Int64s, whole: Int64s) -> NDArray[np.float64]:
    """Return ``(part + 1) / (whole + 2)``, a fraction with Laplace smoothing."""
    return (part + 1) / (whole + 2)
