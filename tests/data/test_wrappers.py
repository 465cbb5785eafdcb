"""One wrapper of a dataset around another can read sessions."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugins import load_registry
from recd_plugins.api import wrapped_dataset

PLUGINS = """
from recd_plugins.api import *

class Same(DatasetWrapper):
    name = "rowfix.same"
    def reader(self, **given): return self.inner.reader(**given)

class BySession(DatasetWrapper):
    name = "rowfix.by_session"
    def reader(self, **given): return self.inner.session_reader(**given)

@hookimpl
def register_datasets(): return [Same, BySession]
"""
FILE = """\
version: 1
dataset:
  use: recd.session_parquet
  options: {path: t.parquet}
  wrap: [{use: rowfix.same}, {use: rowfix.by_session}, {use: rowfix.by_session}]
converter: {use: recd.kjt}
"""


def test_sessions_are_known_through_a_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {
        "session_id": [row // 4 for row in range(64)],
        "ts": range(64),
        "label": [row % 2 for row in range(64)],
        "seen": pa.array([[row // 4, 1] for row in range(64)], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), "t.parquet")
    Path("plugins").mkdir()
    Path("plugins/rowfix.py").write_text(PLUGINS)
    Path("r.yaml").write_text(FILE)
    dataset = wrapped_dataset(load_registry("r.yaml", plugins_dir="plugins"))
    reader = dataset.reader(rank=0, world_size=1, batch_size=8, split="train")
    sessions = [set(rows.data.column("session_id").to_pylist()) for rows in reader]
    assert sessions[:2] == [{0, 1}, {2, 3}]
