"""Runs on 2 ranks: losses of stock TorchRec and of the model that is not sharded; resumed alike."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.commands import invoke, recd

from recd_plugin_ranking.full_ranking import Rules, _check_scores, _Had, _positive
from recd_plugin_ranking.items import Items
from recd_plugin_ranking.tests.click_cases import ITEMS, clicks, with_column
from recd_plugin_runs.export import PROGRAM, export_to
from recd_plugins import load_registry, prepare
from recd_plugins.data.rows import rows_of_split
from recd_plugins.model.build import build_model
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint_dcp import METADATA
from recd_plugins.training.checkpoint_files import MANIFEST, digest_of, manifest_text, read_manifest
from recd_plugins.training.result import Result
from recd_plugins.training.trained import unchecked_model, whole_model, with_trained_columns
from recd_plugins.training.trainer import Job, train

SIZES = {"num_embeddings": ITEMS, "embedding_dim": 8}
ITEM = {"history": "history", "item": "item", "max_length": 4, **SIZES}
SASREC = {"use": "ranking.sasrec", "options": ITEM}
TOWERS = {"item": ["item", "colour"], "item_dense": [0], "hidden": [8], **SIZES}
TWO_TOWER = {"use": "ranking.two_tower", "options": TOWERS}
DRAWN = {"item": "item", "with_item": ["colour", "price"], "negatives": 2}
NEGATIVES = {"use": "ranking.negatives", "options": DRAWN}


def write_registry(
    folder: Path,
    model: dict[str, Any],
    converter: str = "recd.ikjt",
    sharding: Sequence[dict[str, Any]] = (),
    **options: Any,
) -> Path:
    """A registry with negatives; ``options`` are of the model, ``loss`` binary by default."""
    table = clicks(folder / "clicks.parquet", rows=240)
    dataset = {"use": "recd.session_parquet", "options": {"path": str(table)}}
    steps = {"batch_size": 24, "steps": 8, "epochs": 2, "evaluate": False}
    document = {
        "version": 1,
        "dataset": {**dataset, "wrap": [NEGATIVES]},
        "converter": {"use": converter},
        "sharding": sharding,
        "model": {**model, "options": {**model["options"], "loss": "binary", **options}},
        "training": {**steps, "optimizer": "sgd", "learning_rate": 0.5},
    }
    (folder / "checkpoints").mkdir()
    (folder / "r.yaml").write_text(json.dumps(document), encoding="utf-8")
    return folder / "r.yaml"


def train_each(rank: int, world_size: int, jobs: list[Job]) -> list[Result]:
    return [train(rank, world_size, job) for job in jobs]


def losses_of_one_model(path: Path) -> list[float]:
    registry = load_registry(path)
    registry.dataset.prepare()
    torch.manual_seed(registry.training.seed)
    prepared = prepare(registry, build_model(registry, registry.dataset.schema()))
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
    jobs = [Job(path), Job(path, variant="baseline")]
    plugins, baseline = run_on_ranks(train_each, 2, jobs)[0]
    alone = losses_of_one_model(path)
    np.testing.assert_allclose(plugins.losses, baseline.losses, rtol=0, atol=1e-6)
    np.testing.assert_allclose(plugins.losses, alone, rtol=0, atol=1e-6)


def test_a_run_that_is_resumed_goes_on_bit_for_bit(tmp_path):
    path = write_registry(tmp_path, SASREC, loss="sampled_softmax", dropout=0.3, most_candidates=6)
    checkpoint = {"path": str(tmp_path / "checkpoints"), "every": 1}
    jobs = [
        Job(path),
        Job(path, overrides={"checkpoint": checkpoint, "steps": 6}),
        Job(path, overrides={"checkpoint": checkpoint, "workers": 2}),
    ]
    whole, first, resumed = run_on_ranks(train_each, 2, jobs)[0]
    assert whole.losses == resumed.losses
    assert first.losses == whole.losses[:6]


def test_a_checkpoint_of_before_replicated_tables_were_named_as_others(tmp_path):
    replicated = {"use": "torchrec.data_parallel", "tables": ["t_colour"]}
    path = write_registry(tmp_path, TWO_TOWER, sharding=[replicated])
    fixed = {"optimizer": "rowwise_adagrad", "learning_rate": 0.1}
    kept = {**fixed, "checkpoint": {"path": str(tmp_path / "checkpoints"), "every": 4}}
    jobs = [Job(path, overrides=fixed), Job(path, overrides={**kept, "steps": 4})]
    whole, _ = run_on_ranks(train_each, 2, jobs)[0]
    checkpoint = tmp_path / "checkpoints" / "step-000000004"
    now = unchecked_model(load_registry(path), checkpoint).state_dict()
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    for field in ("state_dict_metadata", "storage_data"):
        before = {_as_before(key): each for key, each in getattr(metadata, field).items()}
        setattr(metadata, field, before)
    assert "model.copies.embedding_bags.t_colour.weight" in metadata.state_dict_metadata
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))
    files = {**read_manifest(checkpoint), METADATA: digest_of(checkpoint / METADATA)}
    (checkpoint / MANIFEST).write_text(manifest_text(files), encoding="utf-8")

    found = unchecked_model(load_registry(path), checkpoint).state_dict()
    assert all(torch.equal(found[name], each) for name, each in now.items())
    resumed, *_ = run_on_ranks(train_each, 2, [Job(path, overrides=kept)])[0]
    assert resumed.losses == whole.losses


def _as_before(key: Any) -> Any:
    if isinstance(key, str):
        return key.replace("bags.embedding_bags.t_colour", "copies.embedding_bags.t_colour")
    return replace(key, fqn=_as_before(key.fqn))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("trained")
    jobs = {}
    for model, loss in ((SASREC, "sampled_softmax"), (TWO_TOWER, "in_batch")):
        (folder / loss).mkdir()
        path = write_registry(folder / loss, model, loss=loss, num_embeddings=ITEMS + 1)
        checkpoint = {"path": str(folder / loss / "checkpoints")}
        jobs[loss] = Job(path, overrides={"checkpoint": checkpoint, "steps": 1})
    run_on_ranks(train_each, 1, list(jobs.values()))
    return {
        loss: (job.registry, next((folder / loss / "checkpoints").glob("step-*")))
        for loss, job in jobs.items()
    }


@pytest.mark.parametrize("loss", ["sampled_softmax", "in_batch"])
def test_a_trained_model_is_exported_without_the_data_that_it_counted(
    trained, tmp_path, loss, capsys
):
    path, checkpoint = trained[loss]
    share = whole_model(load_registry(path), checkpoint).model.state_dict()["top.share"]
    assert "The data is not what" not in capsys.readouterr().err
    assert len(share.unique()) > 1
    gone = load_registry(path, settings=[f"dataset.options.path={tmp_path}/gone"])
    absent = with_trained_columns(gone, checkpoint)
    found = unchecked_model(absent, checkpoint).state_dict()["top.share"]
    assert torch.equal(found, share)
    export_to(absent, checkpoint, tmp_path, int8=False)
    assert (tmp_path / PROGRAM).exists()


@pytest.mark.parametrize("known", [0, 3])
def test_an_item_that_training_never_saw_is_a_miss_among_few_drawn_ones(trained, tmp_path, known):
    path, checkpoint = trained["sampled_softmax"]
    rows = pq.read_table(path.parent / "clicks.parquet").slice(0, 4)
    pq.write_table(rows, tmp_path / "test.parquet")
    items = pa.array([[ITEMS - 1]] * known + [[ITEMS]] * (4 - known))
    with_column(tmp_path / "test.parquet", "item", items)
    options = ["-k", "5", "--sampled", "2", "--json", str(tmp_path / "figures.json")]
    context = f"dataset.options.test_path={tmp_path}/test.parquet"
    said = recd("rank", path, context, "--checkpoint", checkpoint, *options)
    assert f"The dataset is not the training data of {checkpoint}" in said
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["num_items"] == ITEMS
    assert figures["hr_at_5"] == figures["recall_at_5"] == known / 4
    assert figures["mrr"] <= known / 4
    assert figures["gauc"] <= known / 4


def test_vectors_are_written_over_nothing_that_is_there(trained, tmp_path):
    path, checkpoint = trained["sampled_softmax"]
    context = f"dataset.options.test_path={path.parent}/clicks.parquet"
    rank = ["rank", path, context, "--checkpoint", checkpoint, "--vectors", tmp_path]
    kept = tmp_path / "users.parquet"
    pq.write_table(pa.table({"item": [1], "vector": [[1.0]]}), kept)
    assert f"{kept} already exists" in invoke(*rank).output.replace("\n", "")
    assert not (tmp_path / "items.parquet").exists()
    invoke(*rank, "--force")
    assert pq.read_table(kept).column_names == ["item", "vector"]
    assert len(pq.read_table(tmp_path / "items.parquet")) == ITEMS


def test_rows_without_a_user_are_not_of_one_user(tmp_path):
    path, table = write_registry(tmp_path, SASREC), tmp_path / "clicks.parquet"
    users = [[] if row % 2 else [row % 4] for row in range(240)]
    with_column(table, "history", pa.array(users))
    registry = load_registry(path)
    registry.dataset.prepare()
    items = Items.of(registry.dataset, "item", ["item"])
    rules = Rules("item", "history", (), (), None, 0)
    some = next(rows_of_split(registry.dataset, "train"))
    had = _Had(registry, rules, items).of(some).any(1)
    assert had.tolist() == [row % 2 == 0 for row in range(len(some))]


def test_a_score_that_ranks_nothing_is_refused(tmp_path):
    context = f"dataset.options.test_path={tmp_path}/clicks.parquet"
    registry = load_registry(write_registry(tmp_path, SASREC), settings=[context])
    registry.dataset.prepare()
    items = Items.of(registry.dataset, "item", ["item"])
    rows = next(_positive(registry, "label"))
    scores = np.zeros((len(rows), len(items)))
    _check_scores(rows, scores, items)
    scores[1, 2] = np.inf
    with pytest.raises(DataError, match=r"row 1 \(from 0\): the score of item 2 is inf"):
        _check_scores(rows, scores, items)
