from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.commands import recd

from recd_plugin_dlrm.tests.criteo.criteo_cases import make

sample = partial(recd, "criteo", "sample", "data", "--rows", "200")


@pytest.mark.parametrize(
    ("kind", "file_format"),
    [("terabyte", "tsv"), ("kaggle", "gz"), ("terabyte", "zst"), ("kaggle", "npy")],
)
def test_samples_can_be_read(cwd, kind, file_format):
    said = sample("--kind", kind, "--format", file_format)
    days = 7 if kind == "kaggle" else 3
    assert f"data: {200 * days:,} rows in " in said
    dataset = make(Path("data"), evaluate="nothing")
    assert len(dataset.reader(rank=0, world_size=1, batch_size=1, split="train")) == 200 * days
