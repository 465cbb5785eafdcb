"""What a recommender knew when it made a request, from a log of interactions.

Events are in the order of time, those of one time in the order of the file. Everything that a row
says of its user comes from the user's events before an *anchor*, at which those features were last
refreshed: the event itself, or the first event of its request or session. What it says of its item
comes from the events before its own. So no row shows its own outcome or anything later.

In a log that is scored, an event of which nobody knows the outcome yet is a candidate: its row is
as if it were its user's next event, and no other row knows of it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_recd.interactions_file import Events

Int64s = NDArray[np.int64]
Refresh = Literal["event", "request", "session"]

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
    """Events by user, and in a user's own by time: the *place* of an event is its index here.

    Args:
        events: interactions; ``outcomes`` are not used.
        liked: whether each was positive, bool ``[num_events]``.
        session_gap: seconds without an event after which a user's next session begins.
        refresh: when the features of the user are refreshed.
        impressions: events of a request, where that is when.
        history: items in a history, at most.
        own_anchors: last events of each user whose features are refreshed at the event itself.
        known: whether the outcome of each is known, bool ``[num_events]``; None: all are.
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

        #: Rank in time and row in the file, by place.
        self.ranks: Int64s = by_user
        self.file_rows: Int64s = order
        self._users = events.users[order]
        self._items = events.items[order]
        self._times = events.times[order]
        #: Whether each was positive.
        self.liked: NDArray[np.bool_] = liked[order]

        new_user = _changes(self._users)
        gaps = np.diff(self._times, prepend=self._times[:1])
        #: The place at which each event's session starts.
        self.session_starts: Int64s = _start_of_run(new_user | (gaps > session_gap))

        # From here on indices count known events alone; where all are known they are places. The
        # index of a candidate is that of the known event behind it.
        known = known[order]
        self._index: Int64s = np.cumsum(known) - known
        self._starts: Int64s = self._index[_start_of_run(new_user)]
        self._known_items = self._items[known]
        # One more than there are events, for indices behind the last and before the first.
        self._known_times = np.append(self._times[known], 0)
        self._is_first: NDArray[np.bool_] = self._index == self._starts
        pauses = self._times - self._known_times[self._index - 1]
        new_session = self._is_first | (pauses > session_gap)
        sessions = np.append(_start_of_run(new_session[known]), 0)
        started = np.where(new_session, self._index, sessions[self._index - 1])
        #: The event at which each event's features of the user were last refreshed.
        self.anchors: Int64s = {
            "event": self._index,
            "request": self._index - (self._index - started) % impressions,
            "session": started,
        }[refresh]
        # Counted from the user's last event, which is 1.
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
        """By place: whether it is its user's ``nth`` event from the last and has one before it."""
        return (self._from_last == nth) & ~self._is_first

    def rows(self, places: Int64s) -> pa.RecordBatch:
        """The rows of events by their places, with the columns of ``SCHEMA``."""
        anchors, starts = self.anchors[places], self._starts[places]
        liked_stop, liked_start = self._num_liked[anchors], self._num_liked[starts]
        disliked_stop, disliked_start = anchors - liked_stop, starts - liked_start
        seen, liked = anchors - starts, liked_stop - liked_start
        item_seen, item_liked = self._item_seen[places], self._item_liked[places]
        own = anchors == self._index[places]
        at = np.where(own, self._times[places], self._known_times[anchors])
        # A user's first event has no event before it, and no idle time.
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
        """``rows`` with columns of session, a number of its own, and time, in microseconds."""
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
        """By place: how often the item was seen and liked before. ``items`` are by time."""
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
        """``items[start:stop]`` of each row, of those the last, oldest first."""
        starts = np.maximum(starts, stops - self._history)
        offsets = np.zeros(len(starts) + 1, np.int32)
        np.cumsum(stops - starts, out=offsets[1:])
        index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], stops - starts)
        return pa.ListArray.from_arrays(offsets, items[index])


def _changes(values: Int64s) -> NDArray[np.bool_]:
    """Whether each value differs from the one before; the first does."""
    changed = np.ones(len(values), bool)
    changed[1:] = values[1:] != values[:-1]
    return changed


def _start_of_run(starts: NDArray[np.bool_]) -> Int64s:
    """The index of the last True up to each element."""
    return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))


def _one_each(ids: Int64s) -> pa.ListArray:
    return pa.ListArray.from_arrays(np.arange(len(ids) + 1, dtype=np.int32), ids)


def _share(part: Int64s, whole: Int64s) -> NDArray[np.float64]:
    """A share that starts at one half and follows the counts (Laplace's rule)."""
    return (part + 1) / (whole + 2)
