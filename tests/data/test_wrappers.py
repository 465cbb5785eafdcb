"""Wrappers of a dataset keep each row, and one around another can keep sessions together."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugins import load_registry
from recd_plugins.api import wrapped_dataset

PLUGINS = '''
from recd_plugins.api import *

class Only(DatasetWrapper):
    """Drops each second row, where it is told to."""
    name = "rowfix.only"
    class Options(PluginOptions):
        drops: bool = False
    def reader(self, *, batch_size, **given):
        size = batch_size * (2 if self.options.drops else 1)
        return self.inner.reader(batch_size=size, **given)

class BySession(DatasetWrapper):
    """Reads the column of the session."""
    name = "rowfix.by_session"
    def reader(self, **given): return self.inner.session_reader(**given)

class TwiceReader(Reader):
    def __init__(self, inner): self.inner = inner
    def __len__(self): return 2 * len(self.inner)
    def __iter__(self): return (rows for rows in self.inner for _ in range(2))
    def state_dict(self): return self.inner.state_dict()
    def load_state_dict(self, state): self.inner.load_state_dict(state)

class Twice(DatasetWrapper):
    """Repeats each batch."""
    name = "rowfix.twice"
    def reader(self, **given): return TwiceReader(self.inner.reader(**given))

@hookimpl
def register_datasets(): return [Only, BySession, Twice]
'''
FILE = """\
version: 1
dataset:
  use: recd.session_parquet
  options: {path: t.parquet}
  wrap:
WRAP
converter: {use: recd.kjt}
model: {embedding_dim: 4}
training: {batch_size: 8, steps: 2, ranks: 1}
"""


def write(folder: Path, *entries: str) -> Path:
    rows = range(64)
    columns = {
        "session_id": pa.array([row // 4 for row in rows], pa.int64()),
        "ts": pa.array(rows, pa.int64()),
        "label": pa.array([row % 2 for row in rows], pa.int8()),
        "seen": pa.array([[row // 4, 1] for row in rows], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), folder / "t.parquet")
    (folder / "plugins").mkdir()
    (folder / "plugins" / "rowfix.py").write_text(PLUGINS)
    wrap = "\n".join(f"    - {entry}" for entry in entries)
    (folder / "r.yaml").write_text(FILE.replace("WRAP", wrap))
    return folder / "r.yaml"


def test_sessions_are_known_through_a_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(
        tmp_path, "{use: rowfix.only}", "{use: rowfix.by_session}", "{use: rowfix.by_session}"
    )
    dataset = wrapped_dataset(load_registry(path, plugins_dir=tmp_path / "plugins"))
    reader = dataset.reader(rank=0, world_size=1, batch_size=8, split="train")
    assert [set(rows.data.column("session_id").to_pylist()) for rows in reader][:2] == [
        {0, 1},
        {2, 3},
    ]
