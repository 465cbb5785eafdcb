"""Parts of the benchmark of readers, without Ray and without timing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recd_plugin_dsi.benchmarks import readers
from recd_plugin_dsi.benchmarks.feeding import Fed
from recd_plugin_dsi.benchmarks.killing import _rows
from recd_plugin_dsi.benchmarks.setup import BATCH, PLUGINS, write_registry, write_table
from recd_plugins import load_registry
from recd_plugins.testing.benchmark import Findings

FED = Fed(
    alone_seconds=1.0,
    seconds=[10.0] * 20 + [2.0] * 20,
    waited=[9.0] * 20 + [0.1] * 20,
    readers=[1] * 20 + [4] * 20,
    said="",
)


def test_only_the_last_steps_count() -> None:
    assert FED.stall_share(20) == pytest.approx(0.05)
    assert FED.throughput_of_trainer(20) == pytest.approx(0.5)


def test_readers_over_time_are_drawn(tmp_path: Path) -> None:
    found = Findings([], [readers._over_time(FED)], [])
    (detail,) = found.details
    assert detail.rows[0] == ["2", 20.0, 1.0, pytest.approx(0.9)]
    assert detail.rows[-1] == ["40", 240.0, 4.0, pytest.approx(0.05)]
    drawn = readers.plot(
        {"details": [{"title": detail.title, "rows": detail.rows}]}, tmp_path / "new"
    )
    assert drawn == [tmp_path / "new" / "readers.svg"]
    assert "readers" in drawn[0].read_text()


def test_rows_are_counted_by_their_numbers(tmp_path: Path) -> None:
    """The rank reads by itself; each row once, and the slow step saw it."""
    write_table(tmp_path / "table.parquet", 6)
    seen = tmp_path / "seen"
    seen.mkdir()
    path = write_registry(tmp_path, "own", 6, seconds=0.0, by="computing", seen=seen)
    assert sorted(_rows(0, 1, path)) == list(range(6 * BATCH))
    assert len(list(seen.iterdir())) == 1


@pytest.mark.parametrize("by", ["waiting", "computing"])
def test_the_slow_step_changes_nothing(tmp_path: Path, by: str) -> None:
    write_table(tmp_path / "table.parquet", 2)
    registry = load_registry(
        write_registry(tmp_path, "slow", 2, seconds=0.001, by=by), plugins_dir=PLUGINS
    )
    (entry,) = registry.preprocessing
    values, offsets = torch.tensor([3, 1]), torch.tensor([0, 1, 2])
    assert entry.plugin.transform(values, offsets) == (values, offsets)


def test_registries_name_ray_only_where_they_are_told_to(tmp_path: Path) -> None:
    plain = write_registry(tmp_path, "plain", 2, workers=3)
    fed = write_registry(tmp_path, "fed", 2, ray="readers: 2")
    assert "ingestion" not in plain.read_text()
    assert "ingestion: {use: dsi.ray, options: {readers: 2}}" in fed.read_text()
