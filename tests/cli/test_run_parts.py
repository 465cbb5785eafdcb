"""`recd run` with a table part that fails: its plugin and the entry's line are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli import programs

PLUGIN = '''
from recd_plugins.api import PluginOptions, Sharding, TableStrategy, hookimpl

class Part(TableStrategy):
    def __init__(self, fails):
        self.fails = fails

    def row_memory(self, option, shard, optimizer, device_type):
        if self.fails == "row_memory":
            raise ValueError("boom")

    @classmethod
    def observe(cls, parts, model, steps):
        if parts[0].fails == "observe":
            raise ValueError("boom")

class Split(Sharding):
    """Splits."""
    name = "acme.split"

    class Options(PluginOptions):
        fails: str

    def part(self, tables, setting):
        return Part(self.options.fails)

@hookimpl
def register_shardings():
    return [Split]
'''

REGISTRY = """version: 1
dataset: {{use: dlrm.random, options: {{rows: 64, sparse: {{user: 90}}}}}}
converter: {{use: recd.kjt}}
sharding:
  - {{use: acme.split, tables: ["*"], options: {{fails: {method}}}}}
model: {{embedding_dim: 4, num_embeddings: 100, bottom_mlp: [4], top_mlp: [4]}}
training: {{batch_size: 16, ranks: 1, evaluate: false, device: cpu}}
"""


@pytest.mark.parametrize(("method", "line"), [("row_memory", 10), ("observe", 15)])
def test_a_part_that_raises_is_named(method: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "acme.py").write_text(PLUGIN)
    registry = tmp_path / "registry.yaml"
    registry.write_text(REGISTRY.format(method=method), encoding="utf-8")
    done = programs.recd("--plugins-dir", tmp_path / "plugins", "run", registry)
    assert done.returncode == 1, done.stderr
    wanted = f"registry.yaml:5 sharding[0]: acme.split: {method} failed at "
    assert wanted in done.stderr, done.stderr
    assert f"acme.py:{line}: ValueError: boom" in done.stderr
