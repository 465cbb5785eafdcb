import pyarrow as pa
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.preprocess import Preprocess
from recd_plugins.interfaces import Origin, PluginOptions, Preprocessing, Rows
from recd_plugins.interfaces.batch import Batch
from recd_plugins.runtime.errors import DataError
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor


class Step(Preprocessing):
    def __init__(self, function, name="test.step", **attributes):
        super().__init__(PluginOptions())
        self.function, self.seen = function, 0
        vars(self).update(attributes, name=name)

    def transform(self, values, offsets):
        self.seen += values.numel()
        return self.function(values, offsets)


def add_one(**attributes) -> Step:
    return Step(lambda values, offsets: (values + 1, offsets.clone()), **attributes)


def first_id(**attributes) -> Step:
    def first(values, offsets):
        lengths = torch.diff(offsets).clamp(max=1)
        new_offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return values[offsets[:-1][lengths == 1].long()], new_offsets

    return Step(first, **attributes)


LISTS = {
    "a": [[1, 2], [1, 2], [3], []],
    "b": [[5], [5], [6, 7], [6, 7]],
    "c": [[8], [8], [8], [8]],
}


def make_kjt(weights=None) -> KeyedJaggedTensor:
    rows = [row for lists in LISTS.values() for row in lists]
    return KeyedJaggedTensor(
        keys=list(LISTS),
        values=torch.tensor([number for row in rows for number in row]),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int32),
        weights=weights,
        stride=4,
    )


def make_batch(*, deduplicated: bool) -> Batch:
    form = {"kjt": make_kjt()}
    if deduplicated:
        form = {"ikjts": InverseKeyedJaggedTensor.from_kjt(make_kjt(), [["a", "b"], ["c"]])}
    return Batch(torch.zeros(4, 1), torch.zeros(4), **form)


def lists_of(batch: Batch) -> dict[str, list[list[int]]]:
    kjts = [ikjt.to_kjt() for ikjt in batch.ikjts] or [batch.kjt]
    return {
        key: [row.tolist() for row in jagged.to_dense()]
        for kjt in kjts
        for key, jagged in kjt.to_dict().items()
    }


@pytest.mark.parametrize("deduplicated", [False, True])
def test_steps_run_in_order_on_their_features(deduplicated):
    add, first = add_one(), first_id()
    batch = make_batch(deduplicated=deduplicated)
    after = Preprocess({"a": [add, first], "c": [add], "unknown": [add]})(batch)
    assert lists_of(after) == {
        "a": [[2], [2], [4], []],
        "b": LISTS["b"],
        "c": [[9]] * 4,
    }
    assert lists_of(batch) == LISTS
    form = after.ikjts[0] if deduplicated else after.kjt
    assert form.lengths().dtype == torch.int32


@pytest.mark.parametrize("deduplicated", [False, True])
def test_neighbours_with_the_same_steps_go_together(deduplicated):
    first = first_id()
    batch = make_batch(deduplicated=deduplicated)
    after = Preprocess({key: [first] for key in LISTS})(batch)
    assert lists_of(after) == {key: [row[:1] for row in rows] for key, rows in LISTS.items()}


def test_only_unique_rows_are_transformed():
    on_all, on_unique = add_one(), add_one()
    Preprocess({"a": [on_all], "c": [on_all]})(make_batch(deduplicated=False))
    Preprocess({"a": [on_unique], "c": [on_unique]})(make_batch(deduplicated=True))
    assert (on_all.seen, on_unique.seen) == (9, 4)


def raises(error: Exception) -> Step:
    def fail(values, offsets):
        raise error

    return Step(fail, "test.raises")


def test_what_a_step_raises_is_preceded_by_its_name_and_place():
    note = r"no such id\nplugin 'test\.raises' failed in transform of 'c' \(.*test_preprocess\.py:"
    with pytest.raises(ValueError, match=note):
        Preprocess({"c": [raises(ValueError("no such id"))]})(make_batch(deduplicated=False))
    with pytest.raises(DataError, match=r"^mend the file$"):
        Preprocess({"c": [raises(DataError("mend the file"))]})(make_batch(deduplicated=False))


def test_weights_are_refused():
    kjt = make_kjt(weights=torch.ones(13))
    with pytest.raises(DataError, match=r"features 'a' have weights.* Remove these features"):
        Preprocess({"a": [add_one()]})(Batch(torch.zeros(4, 1), torch.zeros(4), kjt=kjt))


def halves() -> Step:
    def halve(values, offsets):
        return (values / 2).repeat_interleave(2), offsets * 2

    return Step(halve, "test.halves", takes=("numbers",), width=2)


def negative() -> Step:
    return Step(lambda values, offsets: (-values, offsets), "test.negative", scope="id")


def dense_batch() -> Batch:
    dense = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    return Batch(dense, torch.zeros(2))


def test_dense_features_are_transformed_and_widened_in_place():
    steps = {"x": [negative()], "z": [halves(), negative()]}
    batch = dense_batch()
    after = Preprocess(steps, ("x", "y", "z"))(batch)
    assert after.dense_features.tolist() == [[-1, 2, -1.5, -1.5], [-4, 5, -3, -3]]
    assert after.dense_features.dtype == torch.float32
    assert batch.dense_features.tolist() == dense_batch().dense_features.tolist()


def test_a_step_that_makes_a_number_that_is_not_finite_is_named():
    log = Step(lambda values, offsets: (values.log(), offsets), "test.log", scope="id")
    origin = (Origin("part-0.parquet", 100, 2),)
    rows = Rows(pa.RecordBatch.from_pydict({"unused": [0, 0]}), origin)
    steps = {name: [log, negative(), halves()] for name in "xyz"}
    batch = dense_batch()
    batch.dense_features[1, 2] = -6
    with pytest.raises(DataError) as caught:
        Preprocess(steps, ("x", "y", "z"))(batch, rows)
    assert str(caught.value).startswith(
        "part-0.parquet: row 101 (from 0), column 'z': test.log, then test.negative, then "
        "test.halves turned -6.0 into [nan, nan]. "
    )


def partial_batch() -> Batch:
    partial = PartialInverseKeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 3, 4, 5, 9]),
        torch.tensor([0, 1, 2, 0, 0, 1], dtype=torch.int32),
        torch.tensor([3, 3, 3, 1, 1, 0], dtype=torch.int32),
        [5, 1],
    )
    return Batch(torch.zeros(3, 0), torch.zeros(3), partials=(partial,))


def test_shared_ids_are_transformed_once():
    step = add_one(scope="id")
    after = Preprocess({"a": [step], "b": [step]})(partial_batch())
    (partial,) = after.partials
    assert step.seen == 6
    assert partial.values().tolist() == [2, 3, 4, 5, 6, 10]
    assert partial.offsets().tolist() == [0, 1, 2, 0, 0, 1]


def test_cut_rows_go_on_sharing_ids_and_lose_those_of_none():
    keep_one = first_id(kept_lengths=lambda lengths: lengths.clamp(max=1))
    a, b = Preprocess({"a": [keep_one]})(partial_batch()).partials
    assert (a.keys(), b.keys()) == (["a"], ["b"])
    assert (a.values().tolist(), b.values().tolist()) == ([1, 2, 3], [9])
    assert (a.lengths().tolist(), b.lengths().tolist()) == ([1, 1, 1], [1, 1, 0])
    assert a.offsets().dtype == torch.int32


def test_what_looks_beyond_an_id_gets_unique_rows():
    step = add_one()
    after = Preprocess({"b": [step]})(partial_batch())
    assert step.seen == 1
    assert [partial.keys() for partial in after.partials] == [["a"]]
    assert [(ikjt.keys(), ikjt.num_unique()) for ikjt in after.ikjts] == [(["b"], 2)]
