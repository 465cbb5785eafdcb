"""What readers and converters return is looked at before it is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins import load_registry
from recd_plugins.data.check_batch import check_batch, check_rows
from recd_plugins.data.loader import build_dataloader
from recd_plugins.data.plain import PlainConverter
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import FeatureSchema, Origin, Rows
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
from recd_plugins.values.batch import Batch

SCHEMA = FeatureSchema(sparse=("user", "item"), dense=("price",), label="click")
CONVERTER = PlainConverter(PlainConverter.Options())


def kjt(*keys: str, rows: int = 4, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.zeros(rows * len(keys), dtype=dtype),
        lengths=torch.ones(rows * len(keys), dtype=torch.int32),
        stride=rows,
    )


def partial_of(*keys: str) -> PartialInverseKeyedJaggedTensor:
    return PartialInverseKeyedJaggedTensor.from_kjt(kjt(*keys))


def with_lengths(lengths: list[int], num_ids: int) -> KeyedJaggedTensor:
    ids = torch.zeros(num_ids, dtype=torch.int64)
    return KeyedJaggedTensor(["user", "item"], ids, lengths=torch.tensor(lengths), stride=4)


def variable_kjt() -> KeyedJaggedTensor:
    """Over unique rows, which only TorchRec's modules expand."""
    return KeyedJaggedTensor(
        keys=["user", "item"],
        values=torch.zeros(5, dtype=torch.int64),
        lengths=torch.ones(5, dtype=torch.int32),
        stride_per_key_per_rank=[[4], [1]],
        inverse_indices=(["user", "item"], torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0]])),
    )


GOOD = Batch(torch.zeros(4, 1), torch.zeros(4), kjt("user", "item"))


def test_a_batch_that_is_right_passes_in_either_form() -> None:
    check_batch(CONVERTER, GOOD, 4, SCHEMA)
    ikjts = InverseKeyedJaggedTensor.from_kjt(kjt("item"), [["item"]])
    check_batch(CONVERTER, replace(GOOD, kjt=kjt("user"), ikjts=tuple(ikjts)), 4, SCHEMA)
    check_batch(
        CONVERTER, replace(GOOD, kjt=kjt("user"), partials=(partial_of("item"),)), 4, SCHEMA
    )


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (2, 2), (0, 4), (3, -1)])
def test_stretches_outside_of_what_is_stored_are_refused(offset: int, length: int) -> None:
    partial = PartialInverseKeyedJaggedTensor(
        keys=["item"],
        values=torch.zeros(3, dtype=torch.int64),
        offsets=torch.tensor([0, 0, offset, 3]),
        lengths=torch.tensor([3, 1, length, 0]),
        length_per_key=[3],
    )
    with pytest.raises(PluginError) as caught:
        check_batch(CONVERTER, replace(GOOD, kjt=kjt("user"), partials=(partial,)), 4, SCHEMA)
    assert str(caught.value) == (
        f"plain returned row 2 of item as {length} ids from {offset} on; 3 are stored"
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "plain: convert returned NoneType, which is no recd_plugins.values.batch.Batch"),
        (replace(GOOD, kjt=kjt("user")), "plain left out feature item; each"),
        (replace(GOOD, kjt=None), "plain left out features user, item; each"),
        (
            replace(GOOD, ikjts=tuple(InverseKeyedJaggedTensor.from_kjt(kjt("item"), [["item"]]))),
            "plain returned more than once feature item; each",
        ),
        (
            replace(GOOD, partials=(partial_of("item"),)),
            "plain returned more than once feature item",
        ),
        (replace(GOOD, kjt=kjt("user", "item", "ad")), "plain made up feature ad; each"),
        (replace(GOOD, kjt=kjt("user", "item", rows=3)), "returned 3 rows of user, item for 4"),
        (replace(GOOD, kjt=kjt("user", "item", dtype=torch.int32)), "item as torch.int32; ids are"),
        (replace(GOOD, kjt=variable_kjt()), "a kjt with a variable batch per feature"),
        (
            replace(GOOD, labels=torch.zeros(4).requires_grad_()),
            "plain returned labels that require a gradient: detach them",
        ),
        (
            replace(GOOD, kjt=with_lengths([1] * 8, 9)),
            "plain returned 9 ids of user, item whose lengths are 1 to 1 and add up to 8",
        ),
        (
            replace(GOOD, kjt=with_lengths([-1, 2, *[1] * 6], 7)),
            "plain returned 7 ids of user, item whose lengths are -1 to 2 and add up to 7",
        ),
        (replace(GOOD, labels=torch.zeros(4, 1)), r"labels as torch.float32 [4, 1]; expected"),
        (
            replace(GOOD, dense_features=torch.zeros(4, 1).half()),
            "dense_features as torch.float16 [4, 1]; expected torch.float32 or torch.float64",
        ),
    ],
)
def test_a_batch_that_is_wrong_is_refused(batch: Batch, message: str) -> None:
    with pytest.raises(PluginError) as caught:
        check_batch(CONVERTER, batch, 4, SCHEMA)
    assert message in str(caught.value)


PLUGINS = '''
import pyarrow as pa
from recd_plugins.hookspecs import hookimpl
from recd_plugins.interfaces import *

class Numbers(Dataset):
    """Batches of one number after the other."""
    name = "nu.numbers"
    class Options(PluginOptions):
        sizes: list[int]
        fail: bool = False
    def prepare(self): ...
    def schema(self): return FeatureSchema(("id",), (), "label")
    def reader(self, *, rank, world_size, batch_size, split): return Numbered(self.options)

class Numbered(Reader):
    def __init__(self, options): self.options = options
    def __len__(self): return len(self.options.sizes)
    def __iter__(self):
        for number, size in enumerate(self.options.sizes):
            label = 1 - number // 2 % 2
            data = pa.RecordBatch.from_pydict({"id": [[1]] * size, "label": [label] * size})
            yield Rows(data, (Origin("numbers", 0, size),))
        if self.options.fail:
            raise ValueError("no number is left")
    def state_dict(self): return None if self.options.fail else {}
    def load_state_dict(self, state): ...

class Runs(Converter):
    """Fails."""
    name = "nu.runs"
    def convert(self, rows, schema):
        return [][0]

class Rings(Converter):
    """Keeps the memory of two batches, which take turns."""
    name = "nu.rings"
    def convert(self, rows, schema):
        import torch
        from recd_plugins.api.batches import Batch, kjt_from_columns
        from recd_plugins.api.columns import labels, sparse_column
        columns = {name: sparse_column(rows, name) for name in schema.sparse}
        self.ring = getattr(self, "ring", [torch.empty(len(rows)) for _ in range(2)])[::-1]
        self.ring[0].copy_(labels(rows, schema.label))
        kjt = kjt_from_columns(columns, len(rows))
        return Batch(torch.empty(len(rows), 0), self.ring[0], kjt)

class Same(Rings):
    """Makes one batch, and returns that."""
    name = "nu.same"
    def convert(self, rows, schema):
        self.batch = getattr(self, "batch", None) or super().convert(rows, schema)
        return self.batch

@hookimpl
def register_datasets(): return [Numbers]
@hookimpl
def register_converters(): return [Runs, Rings, Same]
'''
PLACE = r".*nu\.py:\d+"


@pytest.mark.parametrize(
    ("options", "converter", "message"),
    [
        (
            "{sizes: []}",
            "recd.kjt",
            r"yaml:2 dataset: nu\.numbers: its reader has no batch",
        ),
        (
            "{sizes: [3]}",
            "recd.kjt",
            r"yaml:2 dataset: nu\.numbers: its reader yielded a batch of 3 rows; .* is 4",
        ),
        (
            "{sizes: [4, 5]}",
            "recd.kjt",
            r"yaml:2 dataset: nu\.numbers: its reader yielded a batch of 5 rows",
        ),
        (
            "{sizes: [4], fail: true}",
            "recd.kjt",
            rf"/registry\.yaml:2 dataset: nu\.numbers: reading failed at {PLACE}: "
            "ValueError: no number is left$",
        ),
        (
            "{sizes: [4]}",
            "nu.runs",
            rf"/registry\.yaml:3 converter: nu\.runs: convert failed at {PLACE}: "
            "IndexError: list index out of range$",
        ),
        (
            "{sizes: [4, 4, 4]}",
            "nu.rings",
            "^nu.rings: batch 3 was written over batch 1, which may be in training then: return ",
        ),
        (
            "{sizes: [4, 4]}",
            "nu.same",
            r"yaml:3 converter: nu\.same: convert returned the batch of the rows before once more",
        ),
    ],
)
def test_a_loader_names_the_plugin(
    tmp_path: Path, options: str, converter: str, message: str
) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "nu.py").write_text(PLUGINS)
    path = tmp_path / "registry.yaml"
    path.write_text(
        f"version: 1\ndataset: {{use: nu.numbers, options: {options}}}\n"
        f"converter: {{use: {converter}}}\ntraining: {{batch_size: 4}}\n"
    )
    registry = load_registry(path, plugins_dir=tmp_path / "plugins")
    with pytest.raises(PluginError, match=message):
        list(build_dataloader(registry, rank=0, world_size=1))
    if "fail" in options:
        loader = build_dataloader(registry, rank=0, world_size=1)
        with pytest.raises(
            PluginError, match=r"yaml:2 dataset: nu.numbers: state_dict of a reader returned None"
        ):
            loader.state_dict()


def test_a_reader_yields_rows() -> None:
    data = pa.RecordBatch.from_pydict({"id": [1]})
    dataset: Any = CONVERTER  # all that is asked of it is its name
    check_rows(dataset, Rows(data, (Origin("x", 0, 1),)), 1)
    with pytest.raises(PluginError, match="its reader yielded RecordBatch, which is no recd_pl"):
        check_rows(dataset, data, 1)
