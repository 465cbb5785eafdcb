import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sparse.test_dedup import expected
from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor


def make_kjt(
    features: dict[str, list[list[int]]], dtype=torch.int64, weights=None, lengths_dtype=torch.int32
) -> KeyedJaggedTensor:
    rows = [row for feature in features.values() for row in feature]
    flat = torch.tensor([number for row in rows for number in row], dtype=dtype)
    return KeyedJaggedTensor(
        keys=list(features),
        values=flat,
        lengths=torch.tensor([len(row) for row in rows], dtype=lengths_dtype),
        weights=weights,
        stride=len(next(iter(features.values()))),
    )


def assert_same_kjt(left: KeyedJaggedTensor, right: KeyedJaggedTensor) -> None:
    assert left.keys() == right.keys()
    assert left.stride() == right.stride()
    for name in ("values", "lengths", "weights_or_none"):
        a, b = getattr(left, name)(), getattr(right, name)()
        if a is None or b is None:
            assert a is b
        else:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def contents(kjt: KeyedJaggedTensor, key: str) -> list[list[tuple]]:
    parts = [kjt[key].to_dense()]
    if kjt.weights_or_none() is not None:
        parts.append(kjt[key].to_dense_weights())
    return [[tuple(each.tolist()) for each in row] for row in zip(*parts, strict=True)]


@st.composite
def kjts(draw):
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    largest = torch.iinfo(dtype).max
    ids = st.sampled_from([0, 1, 2, largest, largest - 1, -1])
    row = st.lists(ids, max_size=4)
    num_rows = draw(st.integers(0, 8))
    pool = draw(st.lists(row, min_size=1, max_size=3))
    chosen = st.lists(st.sampled_from(pool), min_size=num_rows, max_size=num_rows)
    features = {name: draw(chosen) for name in "abc"}
    count = sum(len(row) for feature in features.values() for row in feature)
    weights = None
    if draw(st.booleans()):
        numbers = st.sampled_from([0.0, 0.5, 1.0])
        weights = torch.tensor(draw(st.lists(numbers, min_size=count, max_size=count)))
        weights = weights.to(draw(st.sampled_from([torch.float32, torch.float64, torch.float16])))
    return make_kjt(features, dtype, weights, draw(st.sampled_from([torch.int32, torch.int64])))


@settings(max_examples=60, derandomize=True)
@given(kjts(), st.sampled_from([[["a", "b", "c"]], [["a", "b"], ["c"]], [["a"], ["b"], ["c"]]]))
def test_round_trip_is_exact_and_merges_all_that_is_equal(kjt, groups):
    ikjts = InverseKeyedJaggedTensor.from_kjt(kjt, groups)
    for ikjt, group in zip(ikjts, groups, strict=True):
        _, inverse = expected([contents(kjt, key) for key in group])
        assert ikjt.inverse_lookup().tolist() == inverse
        assert ikjt.num_unique() == len(set(inverse))
        assert ikjt.stride() == kjt.stride()
    back = KeyedJaggedTensor.concat([ikjt.to_kjt() for ikjt in ikjts])
    assert_same_kjt(back, kjt)


def test_what_cannot_be_deduplicated_is_refused():
    kjt = make_kjt({"a": [[1], [1]]})
    variable = KeyedJaggedTensor(
        ["a"], kjt.values(), lengths=kjt.lengths(), stride_per_key_per_rank=[[2]]
    )
    with pytest.raises(ValueError, match="no feature 'nope'"):
        InverseKeyedJaggedTensor.from_kjt(kjt, [["a", "nope"]])
    with pytest.raises(ValueError, match="variable batch"):
        InverseKeyedJaggedTensor.from_kjt(variable, [["a"]])
    weighted = make_kjt({"a": [[1], [1]]}, weights=torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="weights that require a gradient"):
        InverseKeyedJaggedTensor.from_kjt(weighted, [["a"]])
    for keys in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="keys must be unique"):
            InverseKeyedJaggedTensor(keys, torch.zeros(2), torch.zeros(2), lengths=torch.ones(2))


def test_the_forms_for_torchrec():
    kjt = make_kjt({"a": [[1, 2], [1, 2], [3]], "b": [[4], [4], []]})
    (ikjt,) = InverseKeyedJaggedTensor.from_kjt(kjt, [["a", "b"]])
    unique = ikjt.to_unique_kjt()
    assert unique.stride() == 2
    assert unique["a"].to_dense()[0].tolist() == [1, 2]
    assert ikjt.dedupe_factor() == pytest.approx(7 / 4)


def test_moves_between_devices_and_through_pytrees():
    kjt = make_kjt({"a": [[1, 2], [1, 2], [3]]}, weights=torch.tensor([1.0, 2.0, 1.0, 2.0, 3.0]))
    (ikjt,) = InverseKeyedJaggedTensor.from_kjt(kjt, [["a"]])
    ikjt.offsets()
    assert ikjt.to(torch.device("meta")).device().type == "meta"
    assert_same_kjt(ikjt.to(torch.device("cpu"), non_blocking=True).to_kjt(), kjt)
    leaves, spec = pytree.tree_flatten({"x": ikjt})
    assert len(leaves) == 4
    assert_same_kjt(pytree.tree_unflatten(leaves, spec)["x"].to_kjt(), kjt)
