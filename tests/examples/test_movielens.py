"""The registry of the MovieLens example fits a file of the form that its README tells to make."""

from __future__ import annotations

import re
from pathlib import Path

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
    """2,000 ratings by MovieLens-100K's users and of its films, the last of both among them."""
    head = re.search(r"printf '(.*?)'", (EXAMPLE / "README.md").read_text())
    assert head
    random = np.random.default_rng(0)
    users, items = random.integers(900, 944, 2000), random.integers(1, 1683, 2000)
    users[0], items[0] = 943, 1682
    ratings, times = random.integers(1, 6, 2000), np.sort(random.integers(0, 10**6, 2000))
    lines = ["\t".join(map(str, line)) for line in zip(users, items, ratings, times, strict=True)]
    path.parent.mkdir()
    path.write_text(head[1].encode().decode("unicode_escape") + "\n".join(lines) + "\n")


def test_every_batch_fits_the_tables(registry, tmp_path):
    write_ratings(tmp_path / "data" / "ml-100k.inter")
    registry.dataset.prepare()
    assert registry.dataset.splits() == ("train", "test")
    batches = list(registry.dataloader(rank=0, world_size=2, split="train"))
    assert [len(batch.labels) for batch in batches] == [128] * 7
    sequences = batches[0].sequence_features.keys()
    assert sorted(sequences) == ["history_disliked", "history_liked", "history_seen"]


def test_without_the_file_it_says_where_to_get_it(registry):
    with pytest.raises(DataError, match=r"data/ml-100k.inter: no such file.*grouplens"):
        registry.dataset.prepare()
