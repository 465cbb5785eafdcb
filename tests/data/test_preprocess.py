import pyarrow as pa
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.preprocess import Preprocess
from recd_plugins.errors import DataError, PluginError
from recd_plugins.interfaces import Origin, PluginOptions, Preprocessing, Rows
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
from recd_plugins.values.batch import Batch


class AddOne(Preprocessing):
    """Adds one to each id, and counts the ids that it was given."""

    name = "test.add_one"

    def __init__(self):
        super().__init__(PluginOptions())
        self.ids_seen = 0

    def transform(self, values, offsets):
        self.ids_seen += values.numel()
        return values + 1, offsets.clone()


class FirstId(Preprocessing):
    """Keeps the first id of each row."""

    name = "test.first_id"

    def transform(self, values, offsets):
        lengths = torch.diff(offsets).clamp(max=1)
        new_offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return values[offsets[:-1][lengths == 1].long()], new_offsets


class DropsARow(Preprocessing):
    """Returns too few rows."""

    name = "test.drops_a_row"

    def transform(self, values, offsets):
        return values[: offsets[-2]], offsets[:-1]


class KeepsABuffer(Preprocessing):
    """Returns a part of one tensor, whatever it is called for."""

    name = "test.keeps_a_buffer"
    __hash__ = None  # type: ignore[assignment]  # as that of a dataclass
    buffer = torch.empty(100, dtype=torch.int64)

    def transform(self, values, offsets):
        self.buffer[: len(values)] = values
        return self.buffer[: len(values)], offsets


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
    add, first = AddOne(), FirstId(PluginOptions())
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
    first = FirstId(PluginOptions())
    batch = make_batch(deduplicated=deduplicated)
    after = Preprocess({key: [first] for key in LISTS})(batch)
    assert lists_of(after) == {key: [row[:1] for row in rows] for key, rows in LISTS.items()}


def test_only_unique_rows_are_transformed():
    on_all, on_unique = AddOne(), AddOne()
    Preprocess({"a": [on_all], "c": [on_all]})(make_batch(deduplicated=False))
    Preprocess({"a": [on_unique], "c": [on_unique]})(make_batch(deduplicated=True))
    assert (on_all.ids_seen, on_unique.ids_seen) == (9, 4)


def test_what_has_no_steps_is_passed_along():
    batch = make_batch(deduplicated=True)
    after = Preprocess({"c": [AddOne()], "a": []})(batch)
    assert after.ikjts[0] is batch.ikjts[0]
    assert after.dense_features is batch.dense_features
    plain = make_batch(deduplicated=False)
    assert Preprocess({})(plain).kjt is plain.kjt


def test_a_step_that_changes_the_number_of_rows_is_named():
    steps = {"a": [DropsARow(PluginOptions())]}
    with pytest.raises(PluginError, match=r"test\.drops_a_row returned 3 rows for 4"):
        Preprocess(steps)(make_batch(deduplicated=False))


class Returns(Preprocessing):
    """Returns what it is told to, or raises it."""

    name = "test.returns"

    def __init__(self, result):
        super().__init__(PluginOptions())
        self.result = result

    def transform(self, values, offsets):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result(values, offsets)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda v, o: v, "returned torch.int64 [5]; expected a pair of tensors"),
        (lambda v, o: None, "returned None; expected a pair of tensors"),
        (lambda v, o: (v, None), "expected a pair of tensors"),
        (
            lambda v, o: (v.int(), o),
            "returned values as torch.int32 [5]; expected ids, torch.int64",
        ),
        (lambda v, o: (v[:, None], o), "returned values as torch.int64 [5, 1]; expected ids"),
        (lambda v, o: (v, o.double()), "returned offsets as torch.float64 [9]; expected"),
        (lambda v, o: (v[1:], o), "returned 4 values and offsets from 0 to 5; offsets start at 0"),
        (lambda v, o: (v, o + 1), "returned 5 values and offsets from 1 to 6; offsets start at 0"),
        (lambda v, o: (v, o[[0, 3, 2, *range(3, 9)]]), "returned offsets that fall"),
        (lambda v, o: (v.to_sparse(), o), "returned values as torch.int64 [5] (torch.sparse_coo"),
        (lambda v, o: (v, o.to("meta")), "returned offsets as torch.int32 [9] (torch.strided on m"),
    ],
)
def test_a_step_that_returns_no_jagged_ids_is_named(result, message):
    kjt = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(5),
        lengths=torch.tensor([2, 0, 1, 0, 1, 0, 1, 0], dtype=torch.int32),
        stride=4,
    )
    step = Returns(result)
    with pytest.raises(PluginError) as caught:
        Preprocess({"a": [step], "b": [step]})(Batch(torch.zeros(4, 1), torch.zeros(4), kjt=kjt))
    assert str(caught.value).startswith("test.returns: transform of a, b returned ")
    assert message in str(caught.value)


def test_a_step_that_returns_memory_that_is_still_in_use_is_named():
    step, batch = KeepsABuffer(PluginOptions()), make_batch(deduplicated=False)
    after = Preprocess({"a": [step]})(batch)  # nobody has what it returned for a batch before
    assert lists_of(after) == LISTS
    del after
    assert lists_of(Preprocess({"a": [step]})(batch)) == LISTS
    with pytest.raises(PluginError, match=r"^test\.keeps_a_buffer: transform of c returned memory"):
        Preprocess({"a": [step], "c": [step]})(batch)


def test_what_a_step_raises_is_preceded_by_its_name_and_place():
    with pytest.raises(PluginError) as caught:
        Preprocess({"c": [Returns(ValueError("no such id"))]})(make_batch(deduplicated=False))
    assert str(caught.value).startswith("test.returns: transform of c failed at ")
    assert "test_preprocess.py:" in str(caught.value)
    assert str(caught.value).endswith(": ValueError: no such id")
    assert isinstance(caught.value.__cause__, ValueError), "its traceback is kept"
    with pytest.raises(DataError, match=r"^mend the file$"):
        Preprocess({"c": [Returns(DataError("mend the file"))]})(make_batch(deduplicated=False))


def test_a_step_that_sets_the_default_dtype_of_torch_is_named():
    def doubles(values, offsets):
        torch.set_default_dtype(torch.float64)
        return values, offsets

    with pytest.raises(PluginError, match=r"^test\.returns: transform of c made torch.float64 the"):
        Preprocess({"c": [Returns(doubles)]})(make_batch(deduplicated=False))
    assert torch.get_default_dtype() == torch.float32


def test_weights_are_refused():
    kjt = make_kjt(weights=torch.ones(13))
    with pytest.raises(DataError, match=r"weights cannot be transformed.*: a; take them out"):
        Preprocess({"a": [AddOne()]})(Batch(torch.zeros(4, 1), torch.zeros(4), kjt=kjt))


class Halves(Preprocessing):
    """Numbers as two halves, or as many as ``lies`` makes of them."""

    name = "test.halves"
    takes = ("numbers",)
    width = 2

    def __init__(self, lies=0):
        super().__init__(PluginOptions())
        self.times = 2 + lies

    def transform(self, values, offsets):
        return (values / 2).repeat_interleave(self.times), offsets * self.times


class Negative(Preprocessing):
    """Numbers with the other sign."""

    name = "test.negative"
    takes = ("numbers",)
    scope = "id"

    def transform(self, values, offsets):
        return -values, offsets


def dense_batch() -> Batch:
    dense = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    return Batch(dense, torch.zeros(2))


def test_dense_features_are_transformed_and_widened_in_place():
    negative = Negative(PluginOptions())
    steps: dict[str, list[Preprocessing]] = {"x": [negative], "z": [Halves(), negative]}
    batch = dense_batch()
    after = Preprocess(steps, ("x", "y", "z"))(batch)
    assert after.dense_features.tolist() == [[-1, 2, -1.5, -1.5], [-4, 5, -3, -3]]
    assert after.dense_features.dtype == torch.float32
    assert batch.dense_features.tolist() == dense_batch().dense_features.tolist()


def test_neighbouring_dense_features_go_together():
    halves = Halves()
    after = Preprocess({name: [halves] for name in "xyz"}, ("x", "y", "z"))(dense_batch())
    assert after.dense_features.tolist() == [
        [0.5, 0.5, 1, 1, 1.5, 1.5],
        [2, 2, 2.5, 2.5, 3, 3],
    ]


class Log(Negative):
    """Natural logarithms."""

    name = "test.log"

    def transform(self, values, offsets):
        return values.log(), offsets


class Bounds(Negative):
    """Numbers between -9 and 9."""

    name = "test.bounds"

    def transform(self, values, offsets):
        return values.clamp(-9, 9), offsets


def test_a_step_that_makes_a_number_that_is_not_finite_is_named():
    negative, log = Negative(PluginOptions()), Log(PluginOptions())
    origin = (Origin("part-0.parquet", 100, 2),)
    rows = Rows(pa.RecordBatch.from_pydict({"unused": [0, 0]}), origin)
    steps = {name: [log, negative, Halves()] for name in "xyz"}
    batch = dense_batch()
    batch.dense_features[1, 2] = -6
    with pytest.raises(DataError) as caught:
        Preprocess(steps, ("x", "y", "z"))(batch, rows)
    assert str(caught.value).startswith(
        "part-0.parquet: row 101 (from 0), column 'z': test.log makes nan of -6; "
    )
    with pytest.raises(DataError, match=r"row 1, column 'z': .*makes nan, nan of -3, -3;"):
        Preprocess({"z": [Halves(), log]}, ("x", "y", "z"))(batch)


def test_a_step_may_make_numbers_that_the_next_one_mends():
    steps = [Log(PluginOptions()), Bounds(PluginOptions())]
    batch = dense_batch()
    batch.dense_features[0, 0] = 0
    after = Preprocess({"x": steps}, ("x", "y", "z"))(batch)
    assert after.dense_features[0].tolist() == [-9, 2, 3]


def test_a_step_that_lies_about_its_width_is_named():
    with pytest.raises(PluginError) as caught:
        Preprocess({"y": [Halves(lies=1)]}, ("x", "y", "z"))(dense_batch())
    assert str(caught.value) == (
        "test.halves: transform of dense features y returned rows of other lengths than 2; its "
        "width is 2: a number becomes so many"
    )


def test_a_step_that_changes_the_kind_of_values_is_named():
    step = Returns(lambda values, offsets: (values.long(), offsets))
    with pytest.raises(PluginError, match=r"expected numbers, torch\.float32 \[num_values\]"):
        Preprocess({"y": [step]}, ("x", "y", "z"))(dense_batch())


class ClaimsIds(FirstId):
    """Keeps the first id of each row, and says that it looks at ids alone."""

    name = "test.claims_ids"
    scope = "id"


def test_a_step_that_changes_lengths_under_scope_id_is_named():
    with pytest.raises(PluginError, match=r"test\.claims_ids: transform of a changed the lengths"):
        Preprocess({"a": [ClaimsIds(PluginOptions())]})(make_batch(deduplicated=True))


class Keeps(FirstId):
    """Keeps the first ids, as many as it is told to."""

    name = "test.keeps"

    def __init__(self, kept):
        super().__init__(PluginOptions())
        self.kept = kept

    def kept_lengths(self, lengths):
        return self.kept(lengths)


def partial_batch() -> Batch:
    partial = PartialInverseKeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 3, 4, 5, 9]),
        torch.tensor([0, 1, 2, 0, 0, 1], dtype=torch.int32),
        torch.tensor([3, 3, 3, 1, 1, 0], dtype=torch.int32),
        [5, 1],
    )
    return Batch(torch.zeros(3, 0), torch.zeros(3), partials=(partial,))


class AddOneById(AddOne):
    """The same, and says that it looks at ids alone."""

    scope = "id"


def test_shared_ids_are_transformed_once():
    step = AddOneById()
    after = Preprocess({"a": [step], "b": [step]})(partial_batch())
    (partial,) = after.partials
    assert step.ids_seen == 6
    assert partial.values().tolist() == [2, 3, 4, 5, 6, 10]
    assert partial.offsets().tolist() == [0, 1, 2, 0, 0, 1]


def test_cut_rows_go_on_sharing_ids_and_lose_those_of_none():
    (partial,) = Preprocess({"a": [Keeps(lambda lengths: lengths.clamp(max=1))]})(
        partial_batch()
    ).partials
    assert partial.length_per_key() == [3, 1]
    assert partial.values().tolist() == [1, 2, 3, 9]
    assert partial.lengths().tolist() == [1, 1, 1, 1, 1, 0]
    assert partial.offsets().dtype == torch.int32


def test_what_looks_beyond_an_id_gets_unique_rows():
    step = AddOne()
    after = Preprocess({"b": [step]})(partial_batch())
    assert step.ids_seen == 1
    assert [partial.keys() for partial in after.partials] == [["a"]]
    assert [(ikjt.keys(), ikjt.num_unique()) for ikjt in after.ikjts] == [(["b"], 2)]


def test_partials_without_steps_are_passed_along():
    batch = partial_batch()
    assert Preprocess({"c": [AddOne()]})(batch).partials[0] is batch.partials[0]


@pytest.mark.parametrize(
    "kept", [lambda lengths: lengths + 1, lambda lengths: lengths - 9, lambda lengths: lengths[1:]]
)
def test_kept_lengths_that_cannot_be_are_refused(kept):
    with pytest.raises(PluginError, match=r"test\.keeps: kept_lengths of a returned other than"):
        Preprocess({"a": [Keeps(kept)]})(partial_batch())
