import pyarrow as pa
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.checks import check_ids
from recd_plugins.interfaces import Origin, Rows
from recd_plugins.interfaces.batch import Batch
from recd_plugins.runtime.errors import DataError
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor

ROWS = Rows(pa.RecordBatch.from_pydict({"x": [0] * 4}), (Origin("part-0.parquet", 100, 4),))

FORMS = ("kjt", "ikjts", "partials")


def make_batch(lists, *, form: str, dtype=torch.int64) -> Batch:
    """Feature ``a`` as given, behind a feature whose ids are large."""
    flat = [number for row in lists for number in row]
    kjt = KeyedJaggedTensor(
        keys=["large", "a"],
        values=torch.tensor([2**31 - 1] * len(lists) + flat, dtype=dtype),
        lengths=torch.tensor([1] * len(lists) + [len(row) for row in lists], dtype=torch.int32),
        stride=len(lists),
    )
    features = {
        "kjt": lambda: kjt,
        "ikjts": lambda: InverseKeyedJaggedTensor.from_kjt(kjt, [["large", "a"]]),
        "partials": lambda: (PartialInverseKeyedJaggedTensor.from_kjt(kjt),),
    }
    return Batch(torch.zeros(len(lists), 1), torch.zeros(len(lists)), **{form: features[form]()})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_inside_pass(form, dtype):
    batch = make_batch([[0, 9], [], [9], [9]], form=form, dtype=dtype)
    check_ids(batch, {"a": 10}, ROWS)
    check_ids(batch, {}, ROWS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("lists", "row", "wrong"),
    [
        ([[1], [1], [2, 10, 11], [2, 10, 11]], 102, 10),
        ([[1], [1], [-1], []], 102, -1),
        ([[], [], [], [5] * 2000 + [10]], 103, 10),
        ([[10], [1], [10], [1]], 100, 10),
        ([[1, 2], [2, 3], [3, 10], [10, 4]], 102, 10),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_id_outside_is_named_with_its_first_row(lists, row, wrong, form, dtype):
    batch = make_batch(lists, form=form, dtype=dtype)
    with pytest.raises(DataError) as caught:
        check_ids(batch, {"a": 10}, ROWS)
    message = str(caught.value)
    for part in ("part-0.parquet", f"row {row} ", "'a'", f"id is {wrong},", "has 10 rows, 0 to 9"):
        assert part in message


@pytest.mark.parametrize("form", FORMS)
def test_the_last_step_that_had_the_id_is_named(form):
    titles = {"a": "r.yaml:5 preprocessing[0]: acme.hash"}
    with pytest.raises(
        DataError, match=r"the id is 12, as r\.yaml:5 .*: acme\.hash leaves it, and"
    ):
        check_ids(make_batch([[1], [12]], form=form), {"a": 10}, ROWS, titles)
