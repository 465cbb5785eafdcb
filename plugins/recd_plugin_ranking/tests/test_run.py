"""Runs on 2 ranks: losses of stock TorchRec and of the model that is not sharded; resumed alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML

from recd_plugin_ranking.tests.click_cases import ITEMS, clicks
from recd_plugin_scoring.export import PROGRAM, export_to
from recd_plugins import load_registry
from recd_plugins.model.build import build_model
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.absent_data import with_trained_columns
from recd_plugins.training.job import Job
from recd_plugins.training.result import Result
from recd_plugins.training.trainer import train
from recd_plugins.training.whole_model import unchecked_model, whole_model

SASREC = {
    "use": "ranking.sasrec",
    "options": {
        "history": "history",
        "item": "item",
        "num_embeddings": ITEMS,
        "embedding_dim": 8,
        "max_length": 4,
    },
}
TWO_TOWER = {
    "use": "ranking.two_tower",
    "options": {
        "item": ["item", "colour"],
        "item_dense": [0],
        "embedding_dim": 8,
        "num_embeddings": ITEMS,
        "hidden": [8],
    },
}
NEGATIVES = {
    "use": "ranking.negatives",
    "options": {"item": "item", "with_item": ["colour", "price"], "negatives": 2},
}


def write_registry(
    folder: Path, model: dict[str, Any], converter: str = "recd.ikjt", **options: Any
) -> Path:
    """A registry with negatives; ``options`` are of the model, ``loss`` binary by default."""
    table = clicks(folder / "clicks.parquet", rows=240)
    document = {
        "version": 1,
        "dataset": {
            "use": "recd.session_parquet",
            "options": {"path": str(table)},
            "wrap": [NEGATIVES],
        },
        "converter": {"use": converter},
        "model": {**model, "options": {**model["options"], "loss": "binary", **options}},
        "training": {
            "batch_size": 24,
            "steps": 8,
            "epochs": 2,
            "optimizer": "sgd",
            "learning_rate": 0.5,
            "evaluate": False,
        },
    }
    with (folder / "r.yaml").open("w", encoding="utf-8") as stream:
        YAML().dump(document, stream)
    return folder / "r.yaml"


def train_each(rank: int, world_size: int, jobs: list[Job]) -> list[Result]:
    return [train(rank, world_size, job) for job in jobs]


def losses_of_one_model(path: Path) -> list[float]:
    """What a plain loop over the batches of both ranks gives, with no rank at all."""
    registry = load_registry(path)
    registry.dataset.prepare()
    torch.manual_seed(registry.training.seed)
    prepared = registry.prepare(build_model(registry, registry.dataset.schema()))
    optimizer = torch.optim.SGD(prepared.model.parameters(), lr=0.5)
    loaders = [prepared.dataloader(rank=rank, world_size=2) for rank in range(2)]
    losses: list[float] = []
    while len(losses) < 8:
        for batches in zip(*loaders, strict=True):
            loss = torch.stack([prepared.model(batch)[0] for batch in batches]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:8]


@pytest.mark.parametrize(
    ("model", "converter", "options"),
    [
        (SASREC, "recd.ikjt", {"loss": "sampled_softmax"}),
        (SASREC, "recd.partial_ikjt", {"loss": "softmax"}),
        (SASREC, "recd.ikjt", {}),
        (TWO_TOWER, "recd.ikjt", {"loss": "in_batch"}),
        (TWO_TOWER, "recd.partial_ikjt", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_losses_are_those_without_shards_and_without_deduplication(
    tmp_path, model, converter, options
):
    path = write_registry(tmp_path, model, converter, **options)
    jobs = [Job(path), Job(path, side="baseline")]
    plugins, baseline = run_on_ranks(train_each, 2, jobs)[0]
    alone = losses_of_one_model(path)
    np.testing.assert_allclose(plugins.losses, baseline.losses, rtol=0, atol=1e-6)
    np.testing.assert_allclose(plugins.losses, alone, rtol=0, atol=1e-6)


def test_a_run_that_is_resumed_goes_on_bit_for_bit(tmp_path):
    """With negatives, dropout and drawn candidates, in the second epoch, and by workers."""
    path = write_registry(tmp_path, SASREC, loss="sampled_softmax", dropout=0.3, most_candidates=6)
    (tmp_path / "checkpoints").mkdir()
    checkpoint = {"path": str(tmp_path / "checkpoints"), "every": 1}
    jobs = [
        Job(path),
        Job(path, overrides={"checkpoint": checkpoint, "steps": 6}),
        Job(path, overrides={"checkpoint": checkpoint, "workers": 2}),
    ]
    whole, first, resumed = run_on_ranks(train_each, 2, jobs)[0]
    assert whole.losses == resumed.losses
    assert first.losses == whole.losses[:6]


def test_a_trained_model_is_exported_without_the_data_that_it_counted(tmp_path):
    jobs = []
    for model, loss in ((SASREC, "sampled_softmax"), (TWO_TOWER, "in_batch")):
        folder = tmp_path / loss
        (folder / "checkpoints").mkdir(parents=True)
        checkpoint = {"path": str(folder / "checkpoints")}
        overrides = {"checkpoint": checkpoint, "steps": 1}
        jobs.append(Job(write_registry(folder, model, loss=loss), overrides=overrides))
    run_on_ranks(train_each, 1, jobs)
    for job in jobs:
        (checkpoint,) = (job.registry.parent / "checkpoints").glob("step-*")
        share = whole_model(load_registry(job.registry), checkpoint).model.state_dict()["top.share"]
        assert len(share.unique()) > 1
        (job.registry.parent / "clicks.parquet").unlink()
        absent = with_trained_columns(load_registry(job.registry), checkpoint)
        found = unchecked_model(absent, checkpoint).state_dict()["top.share"]
        assert torch.equal(found, share)
        export_to(absent, checkpoint, job.registry.parent, int8=False)
        assert (job.registry.parent / PROGRAM).exists()
