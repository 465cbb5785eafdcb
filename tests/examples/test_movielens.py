"""The MovieLens example, on a file made as its README tells and on the real one."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests import forked

import recd_plugins
from recd_plugins.data.loader import build_dataloader
from recd_plugins.runtime.errors import DataError

EXAMPLE = Path(__file__).parents[2] / "examples" / "movielens"
README = (EXAMPLE / "README.md").read_text()


@pytest.fixture
def registry(cwd):
    return recd_plugins.load_registry(EXAMPLE / "registry.yaml")


def write_ratings(path: Path, seconds: int = 10**6) -> None:
    """4,000 ratings by users and of films of MovieLens-100K's ids, the last of both among them.

    Within few seconds each user has one long session, within many they have short ones.
    Every other user likes nine films of ten, the others one.
    """
    head = re.search(r"printf '(.*?)'", README)
    assert head
    random = np.random.default_rng(0)
    users, items = random.integers(900, 944, 4000), random.integers(1, 1683, 4000)
    users[0], items[0] = 943, 1682
    likes = random.random(4000) < np.where(users % 2, 0.9, 0.1)
    ratings = np.where(likes, 5, 2)
    times = np.sort(random.integers(0, seconds, 4000))
    lines = ["\t".join(map(str, line)) for line in zip(users, items, ratings, times, strict=True)]
    path.parent.mkdir()
    path.write_text(head[1].encode().decode("unicode_escape") + "\n".join(lines) + "\n")


def run(folder: Path, *options: str) -> dict[str, Any]:
    command = [forked.RECD, "run", EXAMPLE / "registry.yaml", "--json", "report.json", *options]
    forked.run(command, cwd=folder, check=True)
    return json.loads((folder / "report.json").read_text())


def test_every_batch_fits_the_tables(registry, tmp_path):
    write_ratings(tmp_path / "data" / "ml-100k.inter")
    registry.dataset.prepare()
    assert registry.dataset.splits() == ("train", "test")
    batches = list(build_dataloader(registry, rank=0, world_size=2, split="train"))
    assert [len(batch.labels) for batch in batches] == [128] * 14
    sequences = batches[0].sequence_features.keys()
    assert sorted(sequences) == ["history_disliked", "history_liked", "history_seen"]


def test_histories_that_change_at_every_rating_are_stored_partially(cwd):
    write_ratings(cwd / "data" / "ml-100k.inter", seconds=10**4)
    (cwd / "registry_partial.yaml").symlink_to(EXAMPLE / "registry_partial.yaml")
    registry = recd_plugins.load_registry("registry_partial.yaml")
    registry.dataset.prepare()
    batch = next(iter(build_dataloader(registry, rank=0, world_size=1, split="train")))
    histories = {"history_seen", "history_liked", "history_disliked"}
    assert set(batch.segments) == histories
    assert not histories & set(batch.sparse_features.keys())
    seen = registry.converter.report()["history_seen"]
    assert seen.exact < 1.1
    assert seen.partial > 5


def test_the_test_split_is_measured(tmp_path):
    """400 ratings are held out: one batch of 128 on each of two ranks, and what fills none."""
    write_ratings(tmp_path / "data" / "ml-100k.inter")
    report = run(tmp_path)
    assert len(report["losses"]) == 28
    assert report["test"]["num_samples"] == 400
    assert report["test"]["auc"] > 0.8
    assert report["test"]["normalized_entropy"] < 0.9


def test_movielens_100k_is_learned(tmp_path, movielens):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ml-100k.inter").symlink_to(movielens)
    report = run(tmp_path, "--steps", "30")
    assert report["test"]["num_samples"] == 10_000
    assert report["test"]["auc"] > 0.6
    assert report["test"]["normalized_entropy"] < 1


def test_one_model_of_two_labels_is_as_good_as_two_models(tmp_path, movielens, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    two_labels = import_module("two_labels")
    settings = ["training.batch_size=2048", "training.validation=null"]
    found = two_labels.compare(movielens, tmp_path / "out", settings, "shared")
    assert [*found] == [*two_labels.MODELS]
    both, liked, rating = found.values()
    assert both["num_samples"] == liked["num_samples"] == rating["num_samples"] == 10_000
    assert both["liked.auc"] > liked["liked.auc"] - 0.02
    assert both["rating.rmse"] < rating["rating.rmse"] + 0.02
    assert all(name in two_labels.table(found) for name in two_labels.FIGURES)
    scores = tmp_path / "scores.parquet"
    command = [forked.RECD, "predict", str(tmp_path / "out/runs/1"), str(movielens), "-o"]
    assert forked.run([*command, str(scores)], cwd=tmp_path).returncode == 0
    predicted = pq.read_table(scores)
    assert predicted.num_rows == 100_000
    stars = predicted["score_rating"].to_numpy()
    assert 3 < stars.mean() < 4
    assert np.corrcoef(stars, predicted["score_liked"].to_numpy())[0, 1] > 0.7


def test_without_the_file_it_says_where_to_get_it(registry):
    with pytest.raises(DataError, match=r"data/ml-100k.inter: the file does not exist.*grouplens"):
        registry.dataset.prepare()
