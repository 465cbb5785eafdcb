"""Dataset ``dlrm.random``: what is drawn, and that every row is itself wherever it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recd_plugin_dlrm import random_rows
from recd_plugin_dlrm.random_rows import Random
from recd_plugins.interfaces import Split
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts import DatasetContract


def dataset(**options: Any) -> Random:
    values = {"rows": 10_000, "sparse": 2, "prefetch": 0, **options}
    made = Random(Random.Options.model_validate(values))
    made.prepare()
    return made


def read(
    made: Random, batch_size: int = 500, rank: int = 0, world_size: int = 1, split: Split = "train"
) -> pa.Table:
    reader = made.reader(rank=rank, world_size=world_size, batch_size=batch_size, split=split)
    return pa.Table.from_batches([rows.data for rows in reader])


def ids_of(table: pa.Table, name: str = "sparse_0") -> np.ndarray:
    return np.asarray(table[name].combine_chunks().flatten())


class TestContract(DatasetContract):
    @pytest.fixture(params=[{}, {"fixed": False, "exponent": 1.2, "labels": "learnable"}])
    def plugin(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Random:
        monkeypatch.setattr(random_rows, "UNIT_ROWS", 64)
        options = {"rows": 110, "dense": 2, "sparse": 2, "num_indices_per_lookup": 3}
        return Random(Random.Options.model_validate({**options, **request.param}))


def test_a_row_is_the_same_in_any_batch_on_any_rank() -> None:
    made = dataset(fixed=False, dense_distribution="normal", labels="learnable", exponent=1.05)
    whole = read(made, 500)
    assert read(made, 1000).equals(whole.combine_chunks().slice(0, 10_000))
    parts = [read(made, 125, rank, 4) for rank in range(4)]
    assert pa.concat_tables(parts).combine_chunks().equals(whole.combine_chunks())


def test_the_test_split_is_of_other_rows() -> None:
    made = dataset(test_rows=1000)
    assert made.splits() == ("train", "test")
    longer = read(dataset(rows=11_000))
    assert read(made, split="test").combine_chunks().equals(longer.slice(10_000).combine_chunks())
    assert read(made).equals(read(dataset()))
    with pytest.raises(DataError, match="Set option 'test_rows'"):
        read(dataset(), split="test")


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.3])
def test_ids_are_uniform_or_follow_zipfs_law(exponent: float) -> None:
    table = read(dataset(num_ids=40, exponent=exponent))
    assert set(np.diff(table["sparse_0"].combine_chunks().offsets)) == {10}
    counts = np.bincount(ids_of(table), minlength=40)
    assert len(counts) == 40
    expected = np.arange(1, 41) ** -exponent
    expected *= counts.sum() / expected.sum()
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 39 + 5 * np.sqrt(78)


def test_dense_features_are_uniform_or_normal() -> None:
    uniform = np.asarray(read(dataset())["dense_3"])
    assert uniform.dtype == np.float32
    assert 0 <= uniform.min() <= uniform.max() <= 1
    assert abs(uniform.mean() - 0.5) < 0.015
    options = {"dense_distribution": "normal", "dense_mean": 3.0, "dense_std": 0.5}
    normal = np.asarray(read(dataset(**options))["dense_3"])
    assert abs(normal.mean() - 3) < 0.025
    assert abs(normal.std() - 0.5) < 0.02


@pytest.mark.parametrize("labels", ["random", "learnable"])
def test_labels_follow_the_features_where_they_are_learnable(labels: str) -> None:
    options = {"num_ids": 20, "num_indices_per_lookup": 1, "sparse": 1, "dense": 1}
    table = read(dataset(labels=labels, **options))
    label, ids = np.asarray(table["label"]), ids_of(table)
    by_id = np.array([label[ids == each].mean() for each in range(20)])
    correlation = np.corrcoef(np.asarray(table["dense_0"]), label)[0, 1]
    if labels == "random":
        assert abs(label.mean() - 0.5) < 0.025
        assert np.ptp(by_id) < 0.15
        assert abs(correlation) < 0.05
    else:
        assert np.ptp(by_id) > 0.3
        assert correlation > 0.15


def test_features_may_be_named_with_their_ids() -> None:
    made = dataset(sparse={"country": 3, "item": 100}, dense=0)
    assert made.schema().sparse == ("country", "item")
    assert made.schema().dense == ()
    assert set(ids_of(read(made), "country")) == {0, 1, 2}
    with pytest.raises(DataError, match="sparse feature 'label' has the name of the label"):
        dataset(sparse={"label": 3})
