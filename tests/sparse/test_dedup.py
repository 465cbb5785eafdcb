import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recd_plugins.sparse.dedup import ALL_BITS, Deduplicator


def make_column(rows, dtype=np.int64, offsets_dtype=np.int32, first=0):
    """A jagged column whose first row starts at ``first`` in its values."""
    offsets = np.zeros(len(rows) + 1, offsets_dtype)
    offsets[1:] = np.cumsum([len(row) for row in rows])
    values = np.array([-9] * first + [number for row in rows for number in row], dtype)
    return values, (offsets + first).astype(offsets_dtype)


def expected(columns):
    seen = {}
    inverse = [seen.setdefault(tuple(map(tuple, row)), len(seen)) for row in zip(*columns)]  # noqa: B905
    return list(seen), inverse


def check(unique, columns):
    rows, inverse = expected(columns)
    by_column = [row[index] for index in range(len(columns)) for row in rows]
    assert unique.inverse_lookup.tolist() == inverse
    assert unique.lengths.tolist() == [len(row) for row in by_column]
    (values,) = unique.values
    assert values.tolist() == [number for row in by_column for number in row]


@st.composite
def batches(draw):
    """Columns as lists: rows from a small pool, so that they repeat, adjacent or not."""
    ids = st.sampled_from([0, 1, 2, 2**31 - 1, -1])
    pool = draw(st.lists(st.lists(ids, max_size=5), min_size=1, max_size=4))
    # Longer than the blocks in which the kernel compares, and different in one place.
    long_row = list(range(90))
    pool += [long_row, [*long_row[:-1], 7], [7, *long_row[1:]], [*long_row[:50], 7, *long_row[51:]]]
    num_rows = draw(st.integers(0, 12))
    rows = st.lists(st.sampled_from(pool), min_size=num_rows, max_size=num_rows)
    return [draw(rows) for _ in range(3)]


@settings(max_examples=80, derandomize=True)
@given(
    batch=batches(),
    dtype=st.sampled_from([np.int32, np.int64]),
    offsets_dtype=st.sampled_from([np.int32, np.int64]),
    first=st.integers(0, 3),
    hash_mask=st.sampled_from([ALL_BITS, 0, 1]),
)
def test_unique_rows_are_exact_whatever_the_hash(batch, dtype, offsets_dtype, first, hash_mask):
    columns = [make_column(rows, dtype, offsets_dtype, first) for rows in batch]
    a, b, c = columns
    deduplicate = Deduplicator()
    for _ in range(2):  # the second time it knows how much to expect
        unique = deduplicate([[a, b], [c], [a, b, c]], len(batch[0]), hash_mask)
        for found, group in zip(unique, (batch[:2], batch[2:], batch), strict=True):
            check(found, group)


def test_bits_decide_for_floating_point_numbers():
    values, offsets = make_column([[0.0], [-0.0], [0.0], [np.nan], [np.nan]], np.float32)
    (unique,) = Deduplicator()([[(values, offsets)]], 5)
    assert unique.inverse_lookup.tolist() == [0, 1, 0, 2, 2]


def test_columns_of_several_dtypes_come_back_one_array_each():
    ids = make_column([[1, 2], [1, 2], [3]], np.int32)
    weights = make_column([[0.5, 0.25], [0.5, 0.25], [0.125]], np.float64)
    (unique,) = Deduplicator()([[ids, ids, weights]], 3)
    first, second = unique.values
    assert (first.dtype, second.dtype) == (np.int32, np.float64)
    assert first.tolist() == [1, 2, 3, 1, 2, 3]
    assert second.tolist() == [0.5, 0.25, 0.125]


def test_neighbours_only_stores_a_row_that_recurs_once_more():
    rows = [[1, 2], [1, 2], [3], [1, 2], [1, 2], [], []]
    other = [[5], [5], [5], [5], [6], [7], [7]]
    deduplicate = Deduplicator(neighbours_only=True)
    for _ in range(2):  # the second time it knows how much to expect
        alone, both = deduplicate(
            [[make_column(rows)], [make_column(rows), make_column(other)]], len(rows)
        )
        assert alone.inverse_lookup.tolist() == [0, 0, 1, 2, 2, 3, 3]
        assert alone.values[0].tolist() == [1, 2, 3, 1, 2]
        assert alone.lengths.tolist() == [2, 1, 2, 0]
        assert both.inverse_lookup.tolist() == [0, 0, 1, 2, 3, 4, 4]
        assert both.values[0].tolist() == [1, 2, 3, 1, 2, 1, 2, 5, 5, 5, 6, 7]
        assert both.lengths.tolist() == [2, 1, 2, 2, 0, 1, 1, 1, 1, 1]


class WithACallBetween(list):
    def __init__(self, groups, call):
        super().__init__(groups)
        self.call = call

    def __iter__(self):
        self.call()
        return super().__iter__()


def test_threads_may_share_it():
    deduplicate = Deduplicator()
    rows, others = [[1], [2], [1]], [[5], [5], [6]]

    def call():
        (unique,) = deduplicate([[make_column(others)]], 3)
        check(unique, [others])

    (unique,) = deduplicate(WithACallBetween([[make_column(rows)]], call), 3)
    check(unique, [rows])


MOVING = [[1, 2], [1, 2], [3], [], [4, 5, 6], [4, 5, 6]]
MOVING_TOO = [[10], [10], [30, 31], [40], [50], [50]]
GROUPS = {
    "change together": [MOVING, MOVING_TOO],
    "change apart": [MOVING, [[7], [8], [8], [8], [9], [9]]],
    "as many changes in other rows": [MOVING, [[1], [2], [3], [4], [4], [4]]],
    "back to what they were": [[[1], [2], [1], [2], [3], [1]]],
    "alone": [MOVING_TOO],
}


@pytest.mark.parametrize("before", [[[1]] * 6, [[row] for row in range(6)]])
def test_groups_that_are_copied_at_once_stand_next_to_others(before):
    deduplicate = Deduplicator()
    groups = list(GROUPS.values())
    for batch in ([[before]] * len(groups), groups, groups[::-1], groups):
        columns = [[make_column(rows) for rows in group] for group in batch]
        for found, group in zip(deduplicate(columns, 6), batch, strict=True):
            check(found, group)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ((np.zeros(2, np.int16), np.array([0, 1, 2])), "4 or 8 bytes"),
        ((np.zeros(2, np.int64), np.array([0, 1, 2], np.int16)), "int32 or int64"),
        ((np.zeros(4, np.int64)[::2], np.array([0, 1, 2])), "contiguous"),
        ((np.zeros(2, np.int64), np.array([0, 2])), "expected 3"),
        ((np.zeros(2, np.int64), np.array([0, 1, 3])), "there are 2 values"),
        ((np.zeros(2, np.int64), np.array([-1, 1, 2])), "offsets are -1"),
    ],
)
def test_columns_that_the_kernel_cannot_read_are_refused(column, message):
    with pytest.raises(ValueError, match=message):
        Deduplicator()([[column]], 2)
