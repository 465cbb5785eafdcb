"""Features of a log of interactions know no future, and are those of a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recd_plugin_recd.interactions_log import DENSE, Events, InteractionLog

logs = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans(), st.integers(0, 12)),
    min_size=1,
    max_size=30,
)
refreshes = st.sampled_from(["event", "request", "session"])


def log_of(
    events: list[tuple[int, int, bool, int]], refresh, own_anchors: int = 0, known: Any = None
) -> InteractionLog:
    """Sessions end at pauses of three seconds, requests after two events."""
    users, items, liked, times = (np.array(column) for column in zip(*events, strict=True))
    return InteractionLog(
        Events(users, items, liked.astype(float), times.astype(float)),
        liked.astype(bool),
        session_gap=2,
        refresh=refresh,
        impressions=2,
        history=3,
        own_anchors=own_anchors,
        known=known,
    )


def rows_of(log: InteractionLog) -> dict[int, dict[str, Any]]:
    rows = log.rows(np.arange(len(log))).to_pylist()
    return dict(zip(log.file_rows.tolist(), rows, strict=True))


@given(logs, refreshes)
def test_rows_do_not_know_later_events(events, refresh):
    events.sort(key=lambda event: event[3])
    whole = rows_of(log_of(events, refresh))
    for last in range(len(events)):
        assert rows_of(log_of(events[: last + 1], refresh))[last] == whole[last]


@given(logs, refreshes)
def test_features_do_not_know_their_own_label(events, refresh):
    events.sort(key=lambda event: event[3])
    user, item, liked, time = events[-1]
    other = rows_of(log_of([*events[:-1], (user, item, not liked, time)], refresh))
    last = rows_of(log_of(events, refresh))[len(events) - 1]
    changed = {**last, "label": 1 - last["label"]}
    assert other[len(events) - 1] == changed


@given(logs)
def test_features_are_those_of_a_plain_loop(events):
    """The vectorised log against the definition, refreshed at every event."""
    rows = rows_of(log_of(events, "event"))
    order = sorted(range(len(events)), key=lambda index: events[index][3])
    for rank, index in enumerate(order):
        user, item, liked, time = events[index]
        before = [events[other] for other in order[:rank]]
        mine = [event for event in before if event[0] == user]
        of_item = [event for event in before if event[1] == item]
        expected: dict[str, Any] = {
            "user_id": [user],
            "item_id": [item],
            "history_seen": [event[1] for event in mine][-3:],
            "history_liked": [event[1] for event in mine if event[2]][-3:],
            "history_disliked": [event[1] for event in mine if not event[2]][-3:],
            "hour": [0],
            "user_seen": np.log1p(len(mine)),
            "user_liked_share": (sum(event[2] for event in mine) + 1) / (len(mine) + 2),
            "user_idle": np.log1p((time - mine[-1][3]) / 60) if mine else 0,
            "item_seen": np.log1p(len(of_item)),
            "item_liked_share": (sum(event[2] for event in of_item) + 1) / (len(of_item) + 2),
            "label": int(liked),
        }
        assert rows[index].keys() == expected.keys()
        for name, value in expected.items():
            assert rows[index][name] == (pytest.approx(value) if name in DENSE else value)


@given(logs, refreshes, st.integers(0, 2), st.data())
def test_a_candidate_is_as_the_next_event_and_known_to_no_other_row(
    events, refresh, own_anchors, data
):
    known = data.draw(st.lists(st.booleans(), min_size=len(events), max_size=len(events)))
    events = [(u, i, liked and k, t) for (u, i, liked, t), k in zip(events, known, strict=True)]
    found = rows_of(log_of(events, refresh, own_anchors, np.array(known)))
    for row in range(len(events)):
        there = [other for other in range(len(events)) if known[other] or other == row]
        alone = rows_of(log_of([events[other] for other in there], refresh, own_anchors))
        assert found[row] == alone[there.index(row)]
