"""Exported models give the scores of training, whatever the lengths of histories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recd_plugin_runs import export
from recd_plugin_runs.export import ServingModel, exported, exported_parts
from recd_plugins import load_registry
from recd_plugins.interfaces import FeatureSchema
from recd_plugins.model import user_split
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
ATTENDED = "[{use: recd.mean, features: [bought]}, {use: recd.target_attention, features: [seen], options: {target: item, layers: 2, heads: 2}}]"  # noqa: E501
DCN = DLRM.format().replace("{", "{architecture: dcn, cross_layers: 2, ")
REQUEST = ("item", "category", "user", "bought", "seen"), ("age", "price")
#: Models whose features "user", "seen", "bought" and "age" belong to the user.
PARTS = {
    "dot": (DLRM.format(), ATTENDED, *REQUEST),
    "dcn": (DCN, ATTENDED, *REQUEST),
    "two towers": MODELS["two towers"],
}
# Lengths of stored rows, and the stored row of each row.
CASES = {
    "a request": ([30], [0] * 9),
    "unlike rows": ([3, 0, 40, 1, 1], [4, 0, 1, 1, 2, 3, 0]),
    "no ids": ([0, 0], [0, 1, 1]),
    "alike": ([6] * 3, [0, 1, 2]),
}


def serving_model(
    folder: Path, model: str, pooling: str, sparse: tuple[str, ...], dense: tuple[str, ...]
) -> tuple[ServingModel, FeatureSchema]:
    path = folder / "r.yaml"
    path.write_text(REGISTRY.format(model=model, pooling=pooling))
    registry = load_registry(path)
    schema = FeatureSchema(sparse, dense, "label")
    torch.manual_seed(0)
    trained = build_model(registry, schema)
    put_poolings(registry, trained)
    return ServingModel(export.with_plain_tables(trained), schema, {}).eval(), schema


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_programs_are_those_of_models(name: str, tmp_path: Path) -> None:
    serving, schema = serving_model(tmp_path, *MODELS[name])
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


@pytest.mark.parametrize("name", PARTS)
def test_two_programs_score_like_the_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_split, "_MIN_SAVED", {"cpu": 0})
    serving, schema = serving_model(tmp_path, *PARTS[name])
    of_user = ("user", "seen", "bought", "age")
    user, candidates = (part.module() for part in exported_parts(serving, of_user))

    def inputs(names: list[str], num_rows: int, length: int, num_dense: int) -> Any:
        return (
            torch.randn(num_rows, num_dense, dtype=torch.float64),
            {each: torch.randint(50, (num_rows * length,)) for each in names},
            {each: torch.full((num_rows,), length) for each in names},
            {each: torch.arange(num_rows) for each in names},
        )

    for num_rows, length in ((1, 0), (1, 1), (9, 30)):
        first = inputs([n for n in schema.sparse if n in of_user], 1, length, "age" in schema.dense)
        others = [name for name in schema.sparse if name not in of_user]
        second = inputs(others, num_rows, 1, "price" in schema.dense)
        repeated = {each: torch.zeros(num_rows, dtype=torch.int64) for each in first[1]}
        dense = torch.cat([first[0].expand(num_rows, -1), second[0]], dim=1)
        whole = [{**a, **b} for a, b in zip(first[1:3], second[1:3], strict=True)]
        sent = user(*first)
        with torch.no_grad():
            expected = serving(dense, *whole, {**repeated, **second[3]})
        assert num_rows == 1 or expected.std() > 1e-6
        assert (candidates(sent, *second) - expected).abs().max() <= 1e-6
        assert all(num_rows not in each.shape for each in sent.values()) or num_rows == 1
    first[0][:] = torch.nan
    for lengths in first[2].values():
        lengths += 1
    with pytest.raises(RuntimeError, match=r"is negative, or their sum|NaN or infinite"):
        user(*first)


class _Known(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.isin(ids, torch.from_numpy(np.empty(0, np.int64)))


def test_a_vocabulary_of_no_values_can_be_written(tmp_path: Path) -> None:
    program = torch.export.export(_Known(), (torch.arange(3),))
    export._detach_empty(program)
    with (tmp_path / "model.pt2").open("wb") as file:
        torch.export.save(program, file)
    assert not torch.export.load(tmp_path / "model.pt2").module()(torch.arange(3)).any()
