"""Comparison of neighbouring rows, against the plainest way to say it."""

from itertools import pairwise

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recd_plugins.sparse.overlap import first_difference, int32_at, next_change, overlap

u64 = np.uint64


@numba.njit
def run_first_difference(address, start, back, end):
    return first_difference(int32_at(address), u64(start), u64(back), u64(end))


@numba.njit
def run_next_change(address, shift, offsets, num_rows):
    words, changed = int32_at(address), []
    row, stop = u64(1), u64(0)
    while True:
        row, stop = next_change(words, u64(shift), offsets, True, row, stop, u64(num_rows))
        if row >= u64(num_rows):
            break
        changed.append(row)
        row += u64(1)
    return changed


@numba.njit
def run_overlap(address, shift, previous, previous_length, current, length, max_shift):
    return overlap(
        int32_at(address),
        u64(shift),
        u64(previous),
        u64(previous_length),
        u64(current),
        u64(length),
        max_shift,
    )


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 130, 200])
def test_a_difference_is_found_wherever_it_is(length):
    """In blocks, in the last block that overlaps them, and in rows too short for one."""
    row = np.arange(length, dtype=np.int32)
    for back_extra in (0, 7, 70):
        words = np.concatenate([row, np.full(back_extra, -1, np.int32), row])
        start, back, end = length + back_extra, length + back_extra, len(words)
        for at in range(length):
            words[start + at] ^= 1
            assert run_first_difference(address(words), start, back, end) == start + at
            words[start + at] ^= 1
        assert run_first_difference(address(words), start, back, end) == end


@st.composite
def row_lists(draw) -> list[list[int]]:
    rows, row = [], [0]
    for _ in range(draw(st.integers(0, 10))):
        kind = draw(st.sampled_from(["stay", "stay", "touch", "move", "other"]))
        if kind == "touch" and row:
            at = draw(st.integers(0, len(row) - 1))
            row = [*row[:at], row[at] + 2**31, *row[at + 1 :]]
        elif kind == "move":
            row = row[draw(st.integers(0, 3)) :] + draw(st.lists(st.integers(0, 1), max_size=2))
        elif kind == "other":
            row = draw(st.lists(st.integers(-1, 1), max_size=4)) * draw(st.sampled_from([1, 30]))
        rows.append(row)
    return rows


def columns(rows, dtype):
    flat = [number % 2**31 if dtype == np.int32 else number for row in rows for number in row]
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    values = np.array(flat or [0], dtype)
    return values, offsets, [values[a:b].tolist() for a, b in pairwise(offsets)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(row_lists(), st.sampled_from([np.int32, np.int64]))
def test_every_row_that_changes_is_found(rows, dtype):
    values, offsets, rows = columns(rows, dtype)
    shift = values.itemsize // 8
    found = run_next_change(address(values), shift, address(offsets), len(rows))
    assert list(found) == [row for row in range(1, len(rows)) if rows[row] != rows[row - 1]]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(row_lists(), st.sampled_from([np.int32, np.int64]), st.integers(0, 3))
def test_the_smallest_shift_is_found(rows, dtype, max_shift):
    values, offsets, rows = columns(rows, dtype)
    for row in range(1, len(rows)):
        before, current = rows[row - 1], rows[row]
        shifts = [
            k
            for k in range(min(max_shift + 1, len(before)))
            if current[: len(before) - k] == before[k:]
        ]
        expected = 0 if before == current else min(shifts, default=-1)
        found = run_overlap(
            address(values),
            values.itemsize // 8,
            offsets[row - 1],
            len(before),
            offsets[row],
            len(current),
            max_shift,
        )
        assert found == expected
