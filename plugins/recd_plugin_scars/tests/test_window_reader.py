"""Windows of hot batches: every row once, order bounded, exact positions, steps alike on ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recd_plugin_scars.hot_rows import evenly_spread, sort_rows, whole_sessions
from recd_plugin_scars.window_reader import WindowReader
from recd_plugins.data.reader import Piece, PlannedReader, ReadPlan, Unit
from recd_plugins.data.rows import RowTable
from recd_plugins.interfaces import Origin, Reader, Rows

UNIT = 7


def inner(num_rows: int, batch_size: int, rank: int, world_size: int) -> PlannedReader:
    """Rows whose only column is their number, shuffled in units of 7."""

    def read(pieces: Iterator[Piece]) -> Iterator[Rows]:
        for piece in pieces:
            first = piece.unit.first_row + piece.skip
            numbers = pa.array(range(first, first + piece.num_rows), pa.int64())
            data = pa.record_batch([numbers], names=["row"])
            yield Rows(data, (Origin("rows", first, piece.num_rows),))

    firsts = enumerate(range(0, num_rows, UNIT))
    units = tuple(Unit(0, number, at, min(UNIT, num_rows - at)) for number, at in firsts)
    plan = ReadPlan(units, batch_size, shuffle=True)
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
    return PlannedReader(plan, read, data={}, what="rows", ahead=0, **ranks)  # type: ignore[arg-type]


def hot_of(numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray((numbers * 2654435761) % 97 < 55)


class Order:
    def identity(self) -> dict[str, Any]:
        return {}

    def sort(self, window: Sequence[Rows]) -> Iterator[Rows]:
        hot = np.concatenate([hot_of(numbers(rows)) for rows in window])
        return map(RowTable(window).take, sort_rows(hot, len(window[0])))


def numbers(rows: Rows) -> NDArray[np.int64]:
    return np.asarray(rows.data["row"].to_numpy())


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    batch_size, world_size = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    sizes = {"batch_size": batch_size, "world_size": world_size, "window": draw(st.integers(1, 8))}
    return {**sizes, "num_rows": draw(st.integers(3 * batch_size, 120))}


def reader(shape: dict[str, int], rank: int, world_size: int | None = None) -> WindowReader:
    of_ranks = partial(inner, shape["num_rows"], shape["batch_size"])
    size = world_size or shape["world_size"]
    return WindowReader(of_ranks, Order(), num_batches=shape["window"], rank=rank, world_size=size)


def state(of: Reader) -> dict[str, Any]:
    return json.loads(json.dumps(of.state_dict()))


@settings(max_examples=25, deadline=None)
@given(shapes())
def test_a_window_holds_the_rows_that_it_had(shape: dict[str, int]) -> None:
    for rank in range(shape["world_size"]):
        plain = list(inner(shape["num_rows"], shape["batch_size"], rank, shape["world_size"]))
        mine = list(reader(shape, rank))
        assert len(mine) == len(plain) == len(reader(shape, rank))
        for first in range(0, len(plain), shape["window"]):
            part = slice(first, first + shape["window"])
            before = np.concatenate([numbers(rows) for rows in plain[part]])
            after = np.concatenate([numbers(rows) for rows in mine[part]])
            assert sorted(before) == sorted(after)
            for hot in (True, False):
                kept = after[hot_of(after) == hot].tolist()
                assert kept == before[hot_of(before) == hot].tolist(), "hot rows keep their order"
            counts = [hot_of(numbers(rows)).sum() for rows in mine[part]]
            mixed = [count for count in counts if count not in (0, shape["batch_size"])]
            assert len(mixed) <= 1
        for rows in mine:
            origins = [("rows", number) for number in numbers(rows)]
            assert list(map(rows.origin_of, range(len(rows)))) == origins


@settings(max_examples=12, deadline=None)
@given(shapes())
def test_goes_on_at_every_position_and_in_the_next_epoch(shape: dict[str, int]) -> None:
    first = reader(shape, 0)
    states, batches = [state(first)], []
    for rows in first:
        batches.append(numbers(rows).tolist())
        states.append(state(first))
    second = [numbers(rows).tolist() for rows in first]
    for step, at in enumerate(states):
        resumed = reader(shape, 0)
        resumed.load_state_dict(at)
        assert state(resumed) == at
        assert [numbers(rows).tolist() for rows in resumed] == batches[step:]
        assert [numbers(rows).tolist() for rows in resumed] == second


@settings(max_examples=20, deadline=None)
@given(shapes())
def test_positions_and_numbers_of_hot_batches_are_alike_on_ranks(shape: dict[str, int]) -> None:
    ranks = [reader(shape, rank) for rank in range(shape["world_size"])]
    groups: list[list[int]] = [[] for _ in ranks]
    for step in zip(*ranks, strict=True):
        assert len({json.dumps(state(of)) for of in ranks}) == 1
        for of_rank, rows in zip(groups, step, strict=True):
            of_rank.append(int(hot_of(numbers(rows)).sum()))
    size = shape["batch_size"]
    for first in range(0, len(groups[0]), shape["window"]):
        places = [
            {at for at, hot in enumerate(of[first : first + shape["window"]]) if hot == size}
            for of in groups
        ]
        places.sort(key=len)
        assert all(few <= more for few, more in pairwise(places))


@settings(max_examples=50, deadline=None)
@given(shapes(), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=3))
def test_other_numbers_of_ranks_go_on(
    shape: dict[str, int], changes: list[tuple[int, int]]
) -> None:
    taken: list[int] = []
    at, left_out = None, 0
    size, total = shape["batch_size"], shape["num_rows"]
    for world_size, steps in [*changes, (shape["world_size"], 10**6)]:
        ranks = [reader(shape, rank, world_size) for rank in range(world_size)]
        if at is not None:
            for of in ranks:
                of.load_state_dict(at)
        before = [state(of) for of in ranks]
        assert len({json.dumps(each) for each in before}) == 1
        iterators = [iter(of) for of in ranks]
        left_out = 2 * world_size * size
        for _ in range(steps):
            step = [next(iterator, None) for iterator in iterators]
            if None in step:
                assert step == [None] * world_size, "a rank has fewer steps than another"
                assert sorted(set(taken)) == sorted(taken), "a row came twice"
                lost_before = sum(each * size for each, _ in changes)
                assert total - len(taken) < left_out + lost_before
                return
            taken += [n for rows in step if rows is not None for n in numbers(rows).tolist()]
        at = state(ranks[0])


@settings(max_examples=20, deadline=None)
@given(shapes(), st.integers(1, 3), st.integers(0, 12))
def test_workers_share_the_windows(shape: dict[str, int], workers: int, steps: int) -> None:
    alone = reader(shape, 0)
    iterator = iter(alone)
    for _ in range(steps):
        next(iterator, None)
    start = state(alone)
    expected = [(numbers(rows).tolist(), state(alone)) for rows in iterator]
    shares = []
    for worker in range(workers):
        mine = reader(shape, 0)
        mine.load_state_dict(start)
        blocks = mine.blocks(worker, workers)
        shares.append([[(numbers(rows).tolist(), state(mine)) for rows in each] for each in blocks])
        if steps <= len(alone):
            assert state(mine) == state(alone)
    in_turn = [block for turn in zip_longest(*shares, fillvalue=[]) for block in turn]
    if steps <= len(alone):
        assert [batch for block in in_turn for batch in block] == expected


@given(st.integers(1, 200))
def test_every_first_part_of_the_places_is_spread_evenly(num_places: int) -> None:
    places = evenly_spread(num_places)
    assert sorted(places) == list(range(num_places))
    for count in range(1, num_places):
        gaps = np.diff(np.sort(places[:count]))
        assert max(gaps.tolist(), default=0) <= 3 * num_places / count + 1


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1), st.randoms())
def test_a_session_is_hot_when_all_of_its_rows_are(
    sessions: list[tuple[int, bool]], random: Any
) -> None:
    lengths = [length for length, _ in sessions]
    hot, expected = [], []
    for length, whole in sessions:
        rows = [True] * length
        if not whole:
            rows[random.randrange(length)] = False
        hot += rows
        expected += [whole] * length
    starts = np.cumsum([0, *lengths[:-1]])
    assert whole_sessions(np.array(hot), starts).tolist() == expected
