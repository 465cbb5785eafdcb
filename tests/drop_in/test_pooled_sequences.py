"""Sequences that are pooled over unique rows: what pooling by hand gives, refused or equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.drop_in import pooled_sequences_cases as cases
from tests.sharded import configs, sequences
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins import Dedup, PooledSequences
from recd_plugins.runtime.errors import ExactnessError, PluginError, SetupError
from recd_plugins.sharding.guards import guard
from recd_plugins.sparse.deduplicated_kjt import unique_rows
from recd_plugins.testing.gloo import run_on_ranks


def test_it_trains_as_pooling_by_hand_does() -> None:
    for by_hand, plain, deduplicated in run_on_ranks(cases.three_ways, 2):
        for other in (plain, deduplicated):
            assert other.losses == pytest.approx(by_hand.losses, abs=1e-6)
            assert other.weights.keys() == by_hand.weights.keys()
            for name, value in by_hand.weights.items():
                torch.testing.assert_close(other.weights[name], value, atol=1e-6, rtol=0)
        assert deduplicated.ids < plain.ids * 0.8


def test_tables_that_clip_gradients_take_rows_one_by_one() -> None:
    for deduplicated, plain in run_on_ranks(cases.clipped, 2):
        for each in ("actions', 'alone', 'items", "t_items', 't_actions', 't_alone", "_clipping"):
            assert each in deduplicated
        assert not plain


def test_without_ranks() -> None:
    batch, model = next(cases.batches(0)), cases.Wrapped()
    by_hand = cases.ByHand()
    guard(model)
    carries = Dedup(model).batch(batch)
    stored = cases.Batch(unique_rows(carries.sparse), carries.labels)
    assert stored.sparse.stride_per_key() == [cases.BATCH // run for run in cases.RUNS.values()]
    guard(by_hand)
    for each in (carries, stored):
        torch.testing.assert_close(model(each), by_hand(batch), atol=1e-6, rtol=0)
    torch.testing.assert_close(by_hand(carries), by_hand(batch), atol=0, rtol=0)
    with pytest.raises(ExactnessError, match="would ignore its inverse_indices"):
        by_hand(stored)


def collection(*features: str) -> EmbeddingCollection:
    tables = [configs(EmbeddingConfig, n, 9, 8, name=f"t{i}")[0] for i, n in enumerate(features)]
    return EmbeddingCollection(tables)


class Mine(EmbeddingCollection):
    pass


@pytest.mark.parametrize(
    ("collection", "poolings", "message"),
    [
        (collection("a", "b"), {"a": cases.Mean()}, "looks up 'a', 'b'. Pool each"),
        (collection("a"), {"a": cases.Mean(), "z": cases.Mean()}, "features 'a', 'z', but"),
        (collection("a", "a"), {"a": cases.Mean()}, "looks up 'a', 'a'. Pool each"),
        (Mine(collection("a").embedding_configs()), {"a": cases.Mean()}, "got a 'Mine'"),
        (nn.Linear(1, 1), {"a": cases.Mean()}, "got a 'Linear'"),
        (collection("a"), {"a": "recd.maen"}, r"recd\.maen.*[Dd]id you mean .?recd\.mean"),
        (collection("a", "b"), {("a", "b"): "recd.mean"}, "recd.mean' cannot pool"),
        (collection("a"), {"a": "recd.din"}, r"recd.din' cannot pool .*SequencePooling"),
    ],
)
def test_what_it_is_made_of_is_looked_at(collection: Any, poolings: Any, message: str) -> None:
    with pytest.raises((SetupError, PluginError), match=message):
        PooledSequences(collection, poolings)


@pytest.mark.parametrize(
    ("pooling", "told"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), "contains a Dropout (1)"),
        (nn.Sequential(nn.BatchNorm1d(4)), "contains a BatchNorm1d (0)"),
        (
            nn.MultiheadAttention(4, 1, dropout=0.1),
            "contains a MultiheadAttention (the pooling itself)",
        ),
        (nn.MultiheadAttention(4, 1), ""),
        (nn.GRU(4, 4, num_layers=2, dropout=0.1), "contains a GRU (the pooling itself)"),
        (nn.LazyBatchNorm1d(), "contains a LazyBatchNorm1d (the pooling itself)"),
    ],
)
def test_poolings_that_see_more_than_a_row_are_warned_of(
    pooling: nn.Module, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    PooledSequences(sequences("f"), {"f": pooling})
    found = [text for text in caplog.messages if text.startswith("the pooling of 'f' ")]
    assert len(found) == bool(told)
    assert all(text.startswith(f"the pooling of 'f' {told}, ") for text in found)


def test_a_pooling_gives_a_vector_a_row() -> None:
    class Values(nn.Module):
        def forward(self, rows: JaggedTensor) -> torch.Tensor:
            return rows.values()

    kjt = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    told = r"the pooling of 'a' returned the shape \[3, 8\] for 2 rows"
    with pytest.raises(ExactnessError, match=told):
        PooledSequences(collection("a"), {"a": Values()})(kjt)


def test_ids_stay_beside_their_vectors() -> None:
    class Ids(nn.Module):
        def forward(self, *rows: JaggedTensor) -> torch.Tensor:
            sums = [
                torch.segment_reduce(each.weights().float(), "sum", lengths=each.lengths())
                for each in rows
            ]
            return torch.stack(sums, dim=1)

    tables = EmbeddingCollection(collection("a", "b").embedding_configs(), need_indices=True)
    pooled = PooledSequences(tables, {"a": Ids(), ("a", "b"): Ids()})
    stored = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(5),
        lengths=torch.tensor([1, 2, 1, 1]),
        stride_per_key_per_rank=[[2], [2]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 1, 0], [0, 1, 1]])),
    )
    found = pooled(stored)
    assert found["a"].tolist() == [[0], [3], [0]]
    assert found["a", "b"].tolist() == [[0, 3], [3, 4], [0, 4]]


def test_a_deduplicated_batch_needs_its_rows() -> None:
    pooled = PooledSequences(collection("a"), {"a": cases.Mean()})
    stored: Any = {"keys": ["a"], "values": torch.arange(3), "lengths": torch.tensor([1, 2])}
    stored["stride_per_key_per_rank"] = [[2]]
    with pytest.raises(ExactnessError, match="has no inverse_indices"):
        pooled(KeyedJaggedTensor(**stored))
    pooled.sequences = collection("a")  # as a sharder of another's would put one in
    rows = torch.tensor([[0, 1, 0]])
    with pytest.raises(ExactnessError, match="another sharder has sharded"):
        pooled(KeyedJaggedTensor(**stored, inverse_indices=(["a"], rows)))
