"""Exported models give the scores of training, whatever the lengths of histories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from recd_plugin_runs.export import ServingModel, _detach_empty, exported, with_plain_tables
from recd_plugins import load_registry
from recd_plugins.interfaces import FeatureSchema
from recd_plugins.model.build import build_model
from recd_plugins.model.sequence_pooling import put_poolings

REGISTRY = """
version: 1
dataset: {{use: recd.session_parquet, options: {{path: nowhere}}}}
converter: {{use: recd.ikjt}}
pooling: {pooling}
model: {model}
"""
SASREC = "{{use: ranking.sasrec, options: {{history: seen, item: item, num_embeddings: 50, embedding_dim: 8, max_length: 4, correct: false, loss: {loss}}}}}"  # noqa: E501
TOWERS = "{{use: ranking.two_tower, options: {{item: [item], item_dense: [0], num_embeddings: 50, embedding_dim: 8, correct: false, loss: {loss}}}}}"  # noqa: E501
DLRM = "{{embedding_dim: 8, num_embeddings: 50, bottom_mlp: [8], top_mlp: [8]}}"
POOLINGS = """
  - {use: recd.attention, features: [attended], options: {heads: 4}}
  - {use: recd.transformer, features: [encoded, before], options: {layers: 2, norm: pre}}
  - {use: recd.transformer, features: [after], options: {norm: post}}
  - {use: recd.din, features: [asked], options: {target: item, heads: 2}}
  - {use: recd.din, features: [weighed], options: {target: item, weights: sigmoid}}"""
POOLED = ("attended", "encoded", "before", "after", "asked", "weighed")
MEAN = "[{use: recd.mean, features: [bought]}]"
#: Model, pooling, sparse and dense features.
MODELS = {
    "sasrec": (SASREC.format(loss="sampled_softmax"), "[]", ("item", "seen"), ()),
    "sasrec by a layer": (SASREC.format(loss="softmax"), "[]", ("item", "seen"), ()),
    "two towers": (TOWERS.format(loss="in_batch"), MEAN, ("item", "seen", "bought"), ("price",)),
    "poolings": (DLRM.format(), POOLINGS, ("item", *POOLED), ("price",)),
}
# Lengths of stored rows, and the stored row of each row.
CASES = {
    "a request": ([30], [0] * 9),
    "unlike rows": ([3, 0, 40, 1, 1], [4, 0, 1, 1, 2, 3, 0]),
    "no ids": ([0, 0], [0, 1, 1]),
    "alike": ([6] * 3, [0, 1, 2]),
}


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_programs_are_those_of_models(name: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    model, pooling, sparse, dense = MODELS[name]
    path.write_text(REGISTRY.format(model=model, pooling=pooling))
    registry = load_registry(path)
    schema = FeatureSchema(sparse, dense, "label")
    torch.manual_seed(0)
    trained = build_model(registry, schema)
    put_poolings(registry, trained)
    serving = ServingModel(with_plain_tables(trained), schema, {}).eval()
    program = exported(serving).module()
    for lengths, rows in CASES.values():
        histories = [feature for feature in schema.sparse if feature != "item"]
        ids = {feature: torch.randint(50, (sum(lengths),)) for feature in histories}
        inputs = (
            torch.randn(len(rows), len(schema.dense), dtype=torch.float64),
            {"item": torch.randint(50, (len(rows),)), **ids},
            {"item": torch.ones(len(rows), dtype=torch.int64)}
            | dict.fromkeys(histories, torch.tensor(lengths)),
            {"item": torch.arange(len(rows))} | dict.fromkeys(histories, torch.tensor(rows)),
        )
        with torch.no_grad():
            expected = serving(*inputs)
        assert expected.std() > 1e-6
        assert (program(*inputs) - expected).abs().max() <= 1e-6


class _Known(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.isin(ids, torch.from_numpy(np.empty(0, np.int64)))


def test_a_vocabulary_of_no_values_can_be_written(tmp_path: Path) -> None:
    program = torch.export.export(_Known(), (torch.arange(3),))
    _detach_empty(program)
    with (tmp_path / "model.pt2").open("wb") as file:
        torch.export.save(program, file)
    assert not torch.export.load(tmp_path / "model.pt2").module()(torch.arange(3)).any()
