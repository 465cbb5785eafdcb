"""The MovieLens example, on a file made as its README tells and on the real one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recd_plugins
from recd_plugins.errors import DataError

EXAMPLE = Path(__file__).parents[2] / "examples" / "movielens"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return recd_plugins.load_registry(EXAMPLE / "registry.yaml")


def write_ratings(path: Path) -> None:
    """4,000 ratings by users and of films of MovieLens-100K's ids, the last of both among them.

    Every other user likes nine films of ten, the others one.
    """
    head = re.search(r"printf '(.*?)'", (EXAMPLE / "README.md").read_text())
    assert head
    random = np.random.default_rng(0)
    users, items = random.integers(900, 944, 4000), random.integers(1, 1683, 4000)
    users[0], items[0] = 943, 1682
    likes = random.random(4000) < np.where(users % 2, 0.9, 0.1)
    ratings = np.where(likes, 5, 2)
    times = np.sort(random.integers(0, 10**6, 4000))
    lines = ["\t".join(map(str, line)) for line in zip(users, items, ratings, times, strict=True)]
    path.parent.mkdir()
    path.write_text(head[1].encode().decode("unicode_escape") + "\n".join(lines) + "\n")


def run(folder: Path, *options: str) -> dict[str, Any]:
    """The report of ``recd run`` on ``folder``'s data."""
    recd = Path(sys.executable).with_name("recd")
    command = [str(recd), "run", str(EXAMPLE / "registry.yaml"), "--json", "report.json", *options]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_every_batch_fits_the_tables(registry, tmp_path):
    write_ratings(tmp_path / "data" / "ml-100k.inter")
    registry.dataset.prepare()
    assert registry.dataset.splits() == ("train", "test")
    batches = list(registry.dataloader(rank=0, world_size=2, split="train"))
    assert [len(batch.labels) for batch in batches] == [128] * 14
    sequences = batches[0].sequence_features.keys()
    assert sorted(sequences) == ["history_disliked", "history_liked", "history_seen"]


def test_the_test_split_is_measured(tmp_path):
    """400 ratings are held out: one batch of 128 on each of two ranks."""
    write_ratings(tmp_path / "data" / "ml-100k.inter")
    report = run(tmp_path)
    assert len(report["losses"]) == 28
    assert report["test"]["num_samples"] == 256
    assert report["test"]["auc"] > 0.8
    assert report["test"]["normalized_entropy"] < 0.9


def test_movielens_100k_is_learned(tmp_path, movielens):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ml-100k.inter").symlink_to(movielens)
    report = run(tmp_path, "--steps", "30")
    assert report["test"]["num_samples"] == 39 * 2 * 128
    assert report["test"]["auc"] > 0.6
    assert report["test"]["normalized_entropy"] < 1


def test_without_the_file_it_says_where_to_get_it(registry):
    with pytest.raises(DataError, match=r"data/ml-100k.inter: no such file.*grouplens"):
        registry.dataset.prepare()
