"""Exported poolings give what they give in training, whatever the lengths of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recd_plugin_runs.export import ServingModel, exported, with_plain_tables
from recd_plugins import load_registry
from recd_plugins.interfaces import FeatureSchema
from recd_plugins.model.build import build_model
from recd_plugins.model.sequence_pooling import put_poolings

POOLED = ("attended", "encoded", "before", "after", "asked", "weighed")
SCHEMA = FeatureSchema(("item", *POOLED), ("price",), "label")
REGISTRY = """
version: 1
dataset: {use: recd.session_parquet, options: {path: nowhere}}
converter: {use: recd.ikjt}
pooling:
  - {use: recd.attention, features: [attended], options: {heads: 4}}
  - {use: recd.transformer, features: [encoded, before], options: {layers: 2, norm: pre}}
  - {use: recd.transformer, features: [after], options: {norm: post}}
  - {use: recd.din, features: [asked], options: {target: item, heads: 2}}
  - {use: recd.din, features: [weighed], options: {target: item, weights: sigmoid}}
model: {embedding_dim: 8, num_embeddings: 50, bottom_mlp: [8], top_mlp: [8]}
"""
# Lengths of stored rows, and the stored row of each row: a request, rows without ids, and alike.
CASES = {
    "a request": ([30], [0] * 9),
    "unlike rows": ([3, 0, 40, 1, 1], [4, 0, 1, 1, 2, 3, 0]),
    "no ids": ([0, 0], [0, 1, 1]),
    "alike": ([6] * 3, [0, 1, 2]),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServingModel:
    path: Path = tmp_path_factory.mktemp("export") / "r.yaml"
    path.write_text(REGISTRY, encoding="utf-8")
    registry = load_registry(path)
    torch.manual_seed(0)
    trained = build_model(registry, SCHEMA)
    put_poolings(registry, trained)
    return ServingModel(with_plain_tables(trained), SCHEMA, {}).eval()


def test_poolings_are_exported_with_the_scores_of_training(model: ServingModel) -> None:
    program = exported(model).module()
    for lengths, rows in CASES.values():
        one = torch.ones(len(rows), dtype=torch.int64)
        each, of_rows = torch.tensor(lengths), torch.tensor(rows)
        ids = {name: torch.randint(50, (sum(lengths),)) for name in POOLED}
        inputs = (
            torch.randn(len(rows), 1, dtype=torch.float64),
            {"item": torch.randint(50, (len(rows),)), **ids},
            {"item": one, **dict.fromkeys(POOLED, each)},
            {"item": torch.arange(len(rows)), **dict.fromkeys(POOLED, of_rows)},
        )
        with torch.no_grad():
            expected = model(*inputs)
        assert expected.std() > 1e-6
        assert (program(*inputs) - expected).abs().max() <= 1e-6
