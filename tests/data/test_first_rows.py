"""Wrappers of datasets: plans follow the order of their rows, and sessions pass through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.plugin_files import write_plugins
from tests.small_registry import write_registry

from recd_plugins import load_registry
from recd_plugins.data.access import measure_access
from recd_plugins.data.loader import build_dataloader
from recd_plugins.data.prepared import wrapped_dataset
from recd_plugins.interfaces import Table
from recd_plugins.planning.profile import measure_profile

PLUGINS = '''
import numpy as np
from recd_plugins.api import row_tables

class Sorted(Reader):
    """Rows of a session side by side."""
    def __init__(self, inner, size): self._inner, self._size = inner, size
    def __len__(self): return len(self._inner)
    def __iter__(self):
        table = row_tables.RowTable(list(self._inner))
        order = np.arange(64).reshape(16, 4).T.flatten()
        for first in range(0, 64, self._size):
            yield table.take(order[first : first + self._size])
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

class Clustered(DatasetWrapper):
    """Puts equal rows together."""
    name = "acme.clustered"
    def reader(self, *, batch_size, **given):
        return Sorted(self.inner.reader(batch_size=batch_size, **given), batch_size)

class BySession(DatasetWrapper):
    """Reads sessions."""
    name = "acme.by_session"
    def reader(self, **given): return self.inner.session_reader(**given)

class Asks(DatasetWrapper):
    """Orders rows by what the model looks up."""
    name = "acme.asks"
    class Options(PluginOptions):
        what: str = "tables"
    def reader(self, **given):
        reader = self.inner.reader(**given)
        if self.options.what == "of":
            self.lookups.of(next(iter(reader)), ["seen"])
        else:
            getattr(self.lookups, self.options.what)
        return reader
'''
CLUSTERED = {"use": "acme.clustered"}


@pytest.fixture
def load(cwd: Path) -> Any:
    # Rows of 4 sessions in turn: side by side no two are equal.
    sessions = [row % 4 for row in range(64)]
    columns = {
        "session_id": pa.array(sessions, pa.int64()),
        "ts": pa.array(range(64), pa.int64()),
        "label": pa.array([row % 2 for row in range(64)], pa.int8()),
        "seen": pa.array([[session, 9] for session in sessions], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), cwd / "t.parquet")
    plugins_dir = write_plugins(cwd, PLUGINS, "Clustered", "BySession", "Asks")

    def loaded(*wrap: Any) -> Any:
        dataset = {"use": "recd.session_parquet", "options": {"path": "t.parquet"}, "wrap": wrap}
        converter = {"use": "recd.ikjt", "options": {"groups": "auto"}}
        path = write_registry(Path(), dataset=dataset, converter=converter)
        return load_registry(path, plugins_dir=plugins_dir)

    return loaded


def test_a_plan_reckons_with_the_order_of_wrappers(load: Any) -> None:
    found = load(CLUSTERED)
    profile = measure_profile(found)
    assert profile.of("seen").dedupe_factor(16, pooled=True) == 16
    access = measure_access(found, [Table("t", ("seen",), 10, 4, pooled=True)])
    assert access.tables["t"].total == 2 * 64 // 16
    with build_dataloader(found, 0, 1) as loader:
        read = sum(batch.sparse_features.values().numel() for batch in loader)
    assert read == 2 * 64 // 16


@pytest.mark.parametrize("what", ["tables", "of"])
def test_who_asks_for_the_model_is_left_out_by_name(load: Any, what: str) -> None:
    asks = {"use": "acme.asks", "options": {"what": what}}
    alone = measure_profile(load(asks))
    assert alone.features == measure_profile(load()).features
    assert "without acme.asks (registry.yaml:2 dataset.wrap[0])" in alone.source
    both = measure_profile(load(CLUSTERED, asks))
    assert both.features == measure_profile(load(CLUSTERED)).features
    assert "without acme.asks" in both.source


def test_sessions_are_known_through_a_wrapper(load: Any) -> None:
    by_session = {"use": "acme.by_session"}
    dataset = wrapped_dataset(load(CLUSTERED, by_session, by_session))
    rows = next(iter(dataset.reader(rank=0, world_size=1, batch_size=16, split="train")))
    assert rows.data.column("session_id").to_pylist() == [0] * 16
