"""Models that take unique rows for rows, which no shape tells where other rows are all unique."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tests.sharded import sequences
from torch import Tensor, nn
from torchrec.distributed.types import ParameterSharding
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.compat.row_updates import clipped_tables
from recd_plugins.data.row_pipeline import lower
from recd_plugins.interfaces.batch import Batch, ModelInput, Placement
from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.sharding.guards import guard
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor

FEATURES = ("a", "b")
IDS, LENGTHS = torch.tensor([1, 2, 3, 1, 2, 0, 1, 2]), torch.tensor([2, 1, 2, 1, 1, 1])
PLAIN = KeyedJaggedTensor([*FEATURES], IDS, lengths=LENGTHS)


def batch(partial: bool) -> ModelInput:
    """Three rows; those of a are [1, 2], [3], [1, 2], those of b all unique."""
    a, b = PLAIN.split([1, 1])
    parts: Any = {"ikjts": InverseKeyedJaggedTensor.from_kjt(a, [["a"]])}
    if partial:
        parts = {"partials": (PartialInverseKeyedJaggedTensor.from_kjt(a),)}
    made = Batch(dense_features=torch.zeros(3, 1), kjt=b, labels=torch.zeros(3), **parts)
    return lower(made, Placement(sequence=FEATURES))


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.sequences = sequences(*FEATURES, rows=9, dim=2)

    def forward(self, batch: ModelInput) -> Tensor:
        found = self.sequences(batch.sequence_features)
        rows = found["a"]
        if "rows" in self.how:
            rows = batch.unique_rows("a", rows)
        sums = pooled(rows)
        if "inverse" in self.how:
            inverse = batch.inverse_lookup.get("a")
            assert inverse is not None
            sums = sums.index_select(0, inverse)
        if "items" in self.how:
            for _, inverse in batch.inverse_lookup.items():
                sums = sums.index_select(0, inverse)
        return sums + pooled(found["b"])


def pooled(rows: JaggedTensor) -> Tensor:
    return torch.stack([ids.sum(0) for ids in rows.to_dense()])


@pytest.mark.parametrize("moved", [False, True], ids=["as made", "moved"])
@pytest.mark.parametrize("partial", [False, True], ids=["unique", "partial"])
def test_a_model_that_takes_no_notice_is_refused(partial: bool, moved: bool) -> None:
    model = Model("")
    features = batch(partial)
    if moved:  # to a device, between processes
        features = pickle.loads(pickle.dumps(features)).to(torch.device("cpu"))
    assert model(features).shape == (3, 2)  # as if all were well
    guard(model)
    with pytest.raises(ExactnessError, match="ignores deduplication of the features 'a' and pools"):
        model(features)


@pytest.mark.parametrize("partial", [False, True], ids=["unique", "partial"])
def test_tables_that_clip_gradients_are_refused(partial: bool) -> None:
    model = Model("rows inverse")
    kernels = {"t_a": "fused", "t_b": "dense"}
    params = {name: ParameterSharding("table_wise", each, [0]) for name, each in kernels.items()}
    clipped = clipped_tables(model.sequences, params, {"gradient_clipping": True})
    model.sequences.clipped = clipped  # type: ignore[assignment]
    guard(model)
    with pytest.raises(ExactnessError, match="features 'a' are deduplicated, but their tables "):
        model(batch(partial))


@pytest.mark.parametrize(
    ("how", "partial"),
    [("rows inverse", False), ("rows inverse", True), ("inverse", False), ("rows items", False)],
)
def test_a_model_that_repeats_its_results_is_not(how: str, partial: bool) -> None:
    model = Model(how)
    guard(model)
    rows = model(batch(partial))
    plain = model.sequences(PLAIN)
    torch.testing.assert_close(rows, pooled(plain["a"]) + pooled(plain["b"]))
