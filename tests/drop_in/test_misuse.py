"""What a trainer does by mistake, and is told."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.drop_in.forced_dedup import forced_dedup
from torch import nn
from torch.utils.data import DataLoader
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recd_plugins
from recd_plugins.runtime.errors import PluginError, SetupError
from recd_plugins.sparse.deduplicated_kjt import unique_rows
from recd_plugins.training.rank_state import copy_weights, first_weights


def model() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])]
    )


def batch(_: Any = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.zeros(8).long(), lengths=torch.full((4,), 2))


def sequences() -> EmbeddingCollection:
    return EmbeddingCollection(
        [EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])]
    )


def test_what_wrap_returns_is_copied() -> None:
    ready = pickle.loads(pickle.dumps(recd_plugins.wrap(model())))
    assert [type(each) for each in copy.deepcopy(ready).sharders()]


def test_a_schedule_that_nobody_follows(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("version: 1\ntraining: {schedule: {warmup: 3}}\n")
    with pytest.raises(SetupError, match=r"training.schedule is followed by recd run alone"):
        recd_plugins.wrap(model(), path)


@pytest.mark.parametrize("key", ["learning_rate", "eps"])
def test_a_rate_of_an_optimizer_that_is_not_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"version: 1\ntraining: {{{key}: 0.5}}\n")
    with pytest.raises(SetupError, match=rf"training.{key} is of the tables' optimizer, which is"):
        recd_plugins.wrap(model(), path)
    path.write_text(f"version: 1\ntraining: {{{key}: 0.5, optimizer: rowwise_adagrad}}\n")
    assert recd_plugins.wrap(model(), path).sharders()[0].fused_params[key] == 0.5  # type: ignore[attr-defined]


def test_what_is_chosen_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("version: 1\nsharding: [{use: auto}]\n")
    ready = recd_plugins.wrap(model(), path)
    assert f"{ready.chosen}; the registry has no dataset, so no rows are taken" in caplog.text


def test_ranks_cannot_decide_in_workers() -> None:
    """They find one another there in no process group: without this they wait for ever."""
    dedup = recd_plugins.wrap(model()).dedup
    two: Any = range(2)
    loader: Any = DataLoader(two, batch_size=1, collate_fn=lambda _: dedup.batch(batch()))
    with forced_dedup():
        stored = unique_rows(next(iter(loader)))
    assert stored.stride_per_key() == [1], "in the process itself it may"
    dedup.decision = None
    loader = DataLoader(two, batch_size=1, num_workers=1, collate_fn=lambda _: dedup.batch(batch()))
    with pytest.raises(SetupError, match="dedup is in a worker of a DataLoader"):
        next(iter(loader))


def test_poolings_that_see_more_than_a_row(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pooling = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
        recd_plugins.PooledSequences(sequences(), {"f": pooling})
    assert "the pooling of f has 1, a Dropout" in caplog.text
    assert "the pooling of f has 2, a BatchNorm1d" in caplog.text


@pytest.mark.parametrize(
    ("pooling", "what"),
    [
        (nn.MultiheadAttention(4, 1, dropout=0.1), "MultiheadAttention"),
        (nn.MultiheadAttention(4, 1), ""),
        (nn.GRU(4, 4, num_layers=2, dropout=0.1), "GRU"),
        (nn.AlphaDropout(), "AlphaDropout"),
        (nn.RReLU(), "RReLU"),
        (nn.LazyBatchNorm1d(), "LazyBatchNorm1d"),
        (nn.BatchNorm3d(4), "BatchNorm3d"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value or "none",
)
def test_torchs_modules_that_see_more_than_a_row(
    pooling: nn.Module, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    recd_plugins.PooledSequences(sequences(), {"f": pooling})
    told = [text for text in caplog.messages if text.startswith("the pooling of f has itself")]
    assert [text.partition(", a ")[2].partition(":")[0] for text in told] == [what] * bool(what)


def test_names_of_poolings() -> None:
    with pytest.raises(PluginError, match=r"pooling recd.maen; did you mean recd.mean\?"):
        recd_plugins.PooledSequences(sequences(), {"f": "recd.maen"})
    with pytest.raises(PluginError, match=r"recd.din pools one feature.*SequencePooling"):
        recd_plugins.PooledSequences(sequences(), {"f": "recd.din"})


def test_a_feature_that_is_there_twice_stays_as_it_is() -> None:
    twice = KeyedJaggedTensor(["f", "f"], torch.zeros(16).long(), lengths=torch.full((8,), 2))
    dedup = recd_plugins.wrap(model()).dedup
    assert dedup.batch(twice) is twice
    assert dedup.decision is not None
    assert dedup.decision.left == {"batch": "its feature f is there twice"}


def test_weights_of_another_model() -> None:
    weights = first_weights(sequences())
    with pytest.raises(SetupError, match=r"they have embeddings\.t\.weight, and the state dict"):
        copy_weights(model().state_dict(), weights)
