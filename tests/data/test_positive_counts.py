"""How popular items are, counted while a model is made."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from tests.fuzz import tables

from recd_plugins import load_registry
from recd_plugins.data.access import positive_counts


def test_models_that_are_made_on_the_meta_device_are_told_the_same(
    tmp_path: Path, monkeypatch
) -> None:
    """`recd run` makes one there to learn its size, before any other."""
    monkeypatch.chdir(tmp_path)
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    registry = load_registry("registry.yaml")
    with torch.device("meta"):
        counts = positive_counts(registry, "user", tables.NUM_IDS)
    positive = [row["user"] for row in tables.rows() if row["label"]]
    assert counts.sum() == len(positive)
    assert sorted(counts[counts > 0]) == sorted(Counter(map(tuple, positive)).values())
