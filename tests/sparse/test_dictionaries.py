import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recd_plugins.sparse.dictionaries import BrokenListError, DictionaryColumn, unique_lists
from recd_plugins.sparse.from_columns import ikjts_from_dictionaries
from recd_plugins.sparse.jagged import joined


def column(lists: list[list[int]], codes: list[int], skip: int = 0) -> DictionaryColumn:
    """``skip``: lists in front of the dictionary that belong to another slice of it."""
    bounds = np.cumsum([0, *([8] * skip), *(8 * len(ids) for ids in lists)])[skip:]
    data = np.array([9] * skip + [i for ids in lists for i in ids], np.int64)
    return DictionaryColumn(np.array(codes, np.int32), bounds.astype(np.int32), data.view(np.uint8))


@st.composite
def groups(draw):
    num_rows = draw(st.integers(0, 12))
    made = []
    for _ in range(draw(st.integers(0, 3))):
        group = []
        for _ in range(draw(st.integers(1, 3))):
            lists = draw(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
            codes = draw(
                st.lists(st.integers(0, len(lists) - 1), min_size=num_rows, max_size=num_rows)
            )
            group.append((lists, codes))
        made.append(group)
    return made, num_rows, draw(st.integers(0, 2))


@settings(deadline=None)  # the first example compiles
@given(groups())
def test_rows_with_the_same_codes_become_one(drawn):
    made, num_rows, skip = drawn
    columns = [[column(lists, codes, skip) for lists, codes in group] for group in made]
    for group, unique in zip(made, unique_lists(columns, num_rows), strict=True):
        rows = list(zip(*(codes for _, codes in group), strict=True))
        distinct = list(dict.fromkeys(rows))
        assert unique.inverse_lookup.tolist() == [distinct.index(row) for row in rows]
        stored = [group[at][0][row[at]] for at in range(len(group)) for row in distinct]
        assert unique.lengths.tolist() == [len(ids) for ids in stored]
        assert unique.values[0].tolist() == [i for ids in stored for i in ids]


def test_a_broken_list_is_an_error_that_names_the_column():
    whole, broken = column([[1], [2]], [0, 1]), column([[1], [2]], [0, 1])
    broken.bounds[1] = 5
    with pytest.raises(BrokenListError) as caught:
        unique_lists([[whole], [whole, broken]], 2)
    assert caught.value.column == 2


def test_ikjts_of_a_batch_lie_one_after_the_other():
    groups = [{"a": column([[1, 2], [3]], [0, 1, 1])}, {"b": column([[4], [5, 6]], [1, 0, 1])}]
    ikjts = ikjts_from_dictionaries(groups, 3)
    assert [ikjt.inverse_lookup().tolist() for ikjt in ikjts] == [[0, 1, 1], [0, 1, 0]]
    for parts, together in (
        ([ikjt.values() for ikjt in ikjts], [1, 2, 3, 5, 6, 4]),
        ([ikjt.lengths() for ikjt in ikjts], [2, 1, 2, 1]),
    ):
        assert joined(parts).tolist() == together
        assert joined(parts).data_ptr() == parts[0].data_ptr()
