"""``recd criteo sample``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from recd_plugin_dlrm.tests.criteo.criteo_cases import make, sample_rows
from recd_plugins.cli import main


def sample(*options: str) -> str:
    done = CliRunner().invoke(main, ["criteo", "sample", "data", "--rows", "200", *options])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("kind", "file_format"),
    [("terabyte", "tsv"), ("kaggle", "gz"), ("terabyte", "zst"), ("kaggle", "npy")],
)
def test_samples_can_be_read(tmp_path, monkeypatch, kind, file_format):
    monkeypatch.chdir(tmp_path)
    said = sample("--kind", kind, "--format", file_format)
    days = 7 if kind == "kaggle" else 3
    assert f"data: {200 * days:,} rows in " in said
    dataset = make(Path("data"), evaluate="nothing")
    assert len(dataset.reader(rank=0, world_size=1, batch_size=1, split="train")) == 200 * days


def test_ids_are_skewed_and_labels_can_be_learned():
    rows = sample_rows(20_000)
    assert 0.15 < rows.labels.mean() < 0.5
    counts = Counter(rows.sparse[2].tolist())
    assert 0.09 < counts.pop(0) / 20_000 < 0.11  # missing
    assert counts.most_common(1)[0][1] > 20_000 / len(counts) * 20
    clicks = {
        value: rows.labels[rows.sparse[5] == value].mean()
        for value in np.unique(rows.sparse[5]).tolist()
    }
    assert max(clicks.values()) > min(clicks.values()) + 0.2
