"""PartialInverseKeyedJaggedTensor: rows that share ids, exact whatever they share."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sparse.test_ikjt import assert_same_kjt, make_kjt
from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor

MAX_SHIFT = 3


def lists(kjt: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [row.tolist() for row in kjt[key].to_dense()] for key in kjt.keys()}  # noqa: SIM118


@st.composite
def histories(draw, dtype=torch.int64) -> dict[str, list[list[int]]]:
    """Two features whose rows stay, move on by more or less than what is looked for, or change.

    A touched row differs in one id, of 64 bits in the upper half only.

    Some are longer than the blocks in which a kernel compares; ids repeat, so that several shifts
    begin alike.
    """
    num_rows = draw(st.integers(0, 12))
    largest = torch.iinfo(dtype).max
    ids = st.integers(0, 2) | st.sampled_from([largest, -largest])
    features = {}
    for key in "ab":
        row: list[int] = draw(st.lists(ids, max_size=5)) * draw(st.sampled_from([1, 1, 20]))
        rows = []
        for _ in range(num_rows):
            kind = draw(st.sampled_from(["stay", "stay", "move", "cut", "change", "touch"]))
            if kind == "touch" and row:
                at = draw(st.integers(0, len(row) - 1))
                row = [*row[:at], row[at] ^ (largest + 1) // 2, *row[at + 1 :]]
            elif kind == "move":
                row = row[draw(st.integers(0, MAX_SHIFT + 1)) :] + draw(st.lists(ids, max_size=3))
            elif kind == "cut":
                row = row[: len(row) // 2]
            elif kind == "change":
                row = draw(st.lists(ids, max_size=3))
            rows.append(row)
        features[key] = rows
    return features


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@settings(max_examples=60, derandomize=True)
@given(st.data())
def test_a_row_stores_what_the_row_before_lacks(dtype, data):
    rows = data.draw(histories(dtype))
    kjt = make_kjt(rows, dtype)
    partial = PartialInverseKeyedJaggedTensor.from_kjt(kjt, max_shift=MAX_SHIFT)
    assert_same_kjt(partial.to_kjt(), kjt)
    stored = []
    for feature in rows.values():
        total, before = 0, []
        for row in feature:
            shared = [
                len(before) - k
                for k in range(MAX_SHIFT + 1)
                if k < len(before) and row[: len(before) - k] == before[k:]
            ]
            total += len(row) - max(shared, default=0)
            before = row
        stored.append(total)
    assert partial.length_per_key() == stored


@settings(max_examples=60, derandomize=True)
@given(histories(), st.sampled_from([None, [["a", "b"]], [["b"]]]))
def test_the_exact_form_is_exact(rows, groups):
    partial = PartialInverseKeyedJaggedTensor.from_kjt(make_kjt(rows), max_shift=MAX_SHIFT)
    for ikjt in partial.to_ikjt(groups):
        assert lists(ikjt.to_kjt()) == {key: rows[key] for key in ikjt.keys()}  # noqa: SIM118
        together = list(zip(*(rows[key] for key in ikjt.keys()), strict=True))  # noqa: SIM118
        changes = sum(row != before for before, row in pairwise(together))
        assert ikjt.num_unique() == (changes + 1 if together else 0)


def test_a_history_that_moves_on_is_stored_once():
    kjt = make_kjt({"viewed": [[7, 8, 9], [8, 9, 5], [8, 9, 5], [8, 9, 5, 6], []]})
    partial = PartialInverseKeyedJaggedTensor.from_kjt(kjt)
    assert partial.values().tolist() == [7, 8, 9, 5, 6]
    assert partial.offsets().tolist() == [0, 1, 1, 1, 5]
    assert partial.lengths().tolist() == [3, 3, 3, 4, 0]
    assert partial.dedupe_factor() == 13 / 5
    (exact,) = InverseKeyedJaggedTensor.from_kjt(kjt, [["viewed"]])
    assert exact.dedupe_factor() == 13 / 10


def test_some_features_in_any_order():
    rows = {"a": [[1], [1]], "b": [[2, 3], [3, 4]], "c": [[5], [6]]}
    partial = PartialInverseKeyedJaggedTensor.from_kjt(make_kjt(rows), ["c", "b"])
    assert partial.keys() == ["c", "b"]
    assert partial.length_per_key() == [2, 3]
    assert lists(partial.to_kjt()) == {"c": rows["c"], "b": rows["b"]}


def test_what_cannot_be_packed_is_refused():
    kjt = make_kjt({"a": [[1], [2]], "b": [[3], [4]]})
    weighted = KeyedJaggedTensor(["a"], kjt.values(), torch.ones(4), torch.tensor([2, 2]))
    with pytest.raises(ValueError, match="weights"):
        PartialInverseKeyedJaggedTensor.from_kjt(weighted)
    with pytest.raises(ValueError, match="no feature 'c'"):
        PartialInverseKeyedJaggedTensor.from_kjt(kjt, ["c"])
    for keys in (["a", "a"], []):
        with pytest.raises(ValueError, match="keys must be unique"):
            PartialInverseKeyedJaggedTensor(keys, kjt.values(), kjt.values(), kjt.values(), [4])
    variable = KeyedJaggedTensor(
        ["a"], kjt.values(), lengths=kjt.lengths(), stride_per_key_per_rank=[[4]]
    )
    with pytest.raises(ValueError, match="variable batch"):
        PartialInverseKeyedJaggedTensor.from_kjt(variable)


def test_it_is_a_pytree_and_moves():
    partial = PartialInverseKeyedJaggedTensor.from_kjt(make_kjt({"a": [[1, 2], [2, 3]]}))
    doubled = pytree.tree_map(lambda tensor: tensor * 2, partial)
    assert doubled.values().tolist() == [2, 4, 6]
    assert doubled.keys() == ["a"]
    assert doubled.length_per_key() == [3]
    moved = partial.to(torch.device("meta"))
    assert moved.values().is_meta
    assert moved.offsets().is_meta
    assert moved.stride() == 2
