"""``recd criteo sample``."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from recd_plugin_dlrm.tests.criteo.criteo_cases import make
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
