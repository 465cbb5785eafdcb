"""Fitted preprocessing against numpy. Tests of built-in plugins have its contracts."""

from __future__ import annotations

import pickle
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from recd_plugin_tables.preprocessing import Quantiles, Standardise, Vocabulary
from recd_plugins import load_registry, prepare
from recd_plugins.runtime.errors import RegistryError


def made(cls, **options):
    return cls(cls.Options.model_validate(options))


def batches(values, size=7):
    for part in torch.as_tensor(values).split(size):
        yield part, torch.arange(len(part) + 1)


def fitted(plugin, values, size=7):
    plugin.fit("f", batches(values, size))
    return plugin


def apply(plugin, values):
    values = torch.as_tensor(values)
    return plugin.transform(values, torch.tensor([0, len(values)]))[0]


IDS = np.random.default_rng(1).zipf(1.5, 3000).astype(np.int64) * 2**40 - 5
COUNTS = sorted(Counter(IDS.tolist()).items(), key=lambda pair: (-pair[1], pair[0]))


def test_frequent_ids_are_numbered_and_others_are_hashed():
    plugin = fitted(made(Vocabulary, rows=100, hash_rows=30, min_count=2), IDS)
    known = [number for number, count in COUNTS if count >= 2][:70]
    assert apply(plugin, known).tolist() == list(range(1, len(known) + 1))
    others = apply(plugin, [*(number for number, _ in COUNTS[len(known) :]), -1, 2**63 - 1])
    free = {0, *range(len(known) + 1, 100)}
    assert set(others.tolist()) <= free
    assert len(set(others.tolist())) > len(free) / 2
    new = torch.arange(10_000) * 64
    spread = torch.bincount(apply(plugin, new), minlength=100)[sorted(free)]
    assert spread.max() < 2 * spread.float().mean()


def test_many_distinct_ids_are_counted_in_pieces(monkeypatch):
    whole = fitted(made(Vocabulary, rows=500), IDS)
    monkeypatch.setattr("recd_plugin_tables.preprocessing._WAITING", 10)
    assert fitted(made(Vocabulary, rows=500), IDS, size=50).identity() == whole.identity()


def test_features_that_share_a_table_share_a_vocabulary():
    plugin = made(Vocabulary, rows=9, others="unknown", shared=True)
    assert plugin.fits_together
    fitted(plugin, [5, 5, 6])
    fitted(plugin, [7, 7, 7, 6])
    assert apply(plugin, [7, 5, 6]).tolist() == [1, 2, 3]
    assert apply(pickle.loads(pickle.dumps(plugin)), [7, 5, 6]).tolist() == [1, 2, 3]


@pytest.mark.parametrize("offset", [1e8, -1e8, 1e12, 2.0**52])
@pytest.mark.parametrize(("kind", "options"), [(Standardise, {}), (Quantiles, {"buckets": 40})])
def test_numbers_far_from_0_are_transformed_before_they_are_rounded(kind, options, offset):
    values = torch.arange(40, dtype=torch.float64).repeat(5)
    near, far = (fitted(made(kind, **options), given) for given in (values, values + offset))
    expected = apply(near, values).float()
    assert len(expected.unique()) == 40
    found = apply(far, values + offset).float()
    assert len(found.unique()) == 40
    rounding = max(1e-6, abs(offset) * 2**-52)  # of the mean
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding)


def test_a_number_that_never_changes_becomes_0():
    for number in (0.1, 1e8 + 0.3, -5.0):
        values = torch.full((1000,), number, dtype=torch.float64)
        assert not apply(fitted(made(Standardise), values), values).any()


ONE_TABLE = """version: 1
dataset: {{use: recd.session_parquet, options: {{path: nowhere}}}}
converter: {{use: recd.ikjt}}
preprocessing:
  - use: tables.vocabulary
    features: [{features}]
    options: {{rows: 9, shared: {shared}}}
"""


@pytest.mark.parametrize(
    ("features", "shared", "apart"),
    [
        ("item, seen", "true", None),
        ("item, seen", "false", "'item' and for 'seen'"),
        ("seen", "true", "'seen'"),
    ],
)
def test_features_of_one_table_are_not_numbered_apart(tmp_path, features, shared, apart):
    path = tmp_path / "r.yaml"
    path.write_text(ONE_TABLE.format(features=features, shared=shared))
    sizes = {"embedding_dim": 4, "num_embeddings": 9}
    table = EmbeddingConfig(name="t", feature_names=["item", "seen"], **sizes)
    model = EmbeddingCollection(tables=[table], device=torch.device("meta"))
    refused = pytest.raises(RegistryError, match=f"vocabulary for {apart}")
    with refused if apart else nullcontext():
        prepare(load_registry(path), nn.ModuleDict({"sequences": model}))


NUMBERS = (1e6 + np.random.default_rng(2).lognormal(size=5000)).astype(np.float32)


SPREAD = NUMBERS.argsort().astype(np.float32)


def test_quantiles_hold_equally_many_rows(monkeypatch):
    plugin = fitted(made(Quantiles, buckets=10), SPREAD)
    shares, counts = np.unique(apply(plugin, SPREAD), return_counts=True)
    assert np.allclose(shares, np.arange(10) / 9)
    assert counts.min() > 490
    monkeypatch.setattr("recd_plugin_tables.preprocessing._MAX_KEPT", 1000)
    thinned = fitted(made(Quantiles, buckets=10), SPREAD)
    assert thinned.identity() == fitted(made(Quantiles, buckets=10), SPREAD, size=901).identity()
    assert np.abs(apply(thinned, SPREAD) - apply(plugin, SPREAD)).mean() < 0.03


def test_a_number_has_one_bucket_however_it_is_stored():
    numbers = torch.arange(10).repeat(3).double() / 10
    stored = (numbers, numbers.float(), numbers.float().double())
    plugins = [fitted(made(Quantiles, buckets=5), values) for values in stored]
    shares = {tuple(apply(each, values).float().tolist()) for each in plugins for values in stored}
    assert len(shares) == 1
