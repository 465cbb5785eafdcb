"""Collectives of a session outlast its hang_timeout."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import forked

REGISTRY = """\
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: "{folder}/table", sparse: [item_0], generate: {{rows: 512}}}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 50}}}}
model: {{embedding_dim: 4, num_embeddings: 50}}
training:
  batch_size: 16
  ranks: 2
  steps: {steps}
  device: cpu
  checkpoint: {{path: "{folder}/checkpoints"}}
"""


def registry(folder: Path, steps: int) -> Path:
    path = folder / "registry.yaml"
    path.write_text(REGISTRY.format(folder=folder, steps=steps), encoding="utf-8")
    return path


WAITS = '''
import torch
import torch.distributed as dist
from recd_plugins.api import Callback, hookimpl

class Waits(Callback):
    """Says how long collectives wait."""
    name = "acme.waits"

    def on_start(self, start):
        group = dist.group.WORLD._get_backend(torch.device("cpu"))
        print(f"<{group.options._timeout.total_seconds():g}>", flush=True)

@hookimpl
def register_plugins():
    return [Waits]
'''


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_collectives_wait_longer_than_the_timeout(tmp_path: Path, under_torchrun: bool) -> None:
    path = registry(tmp_path, 1)
    path.write_text(f"{path.read_text()}callbacks: [{{use: acme.waits}}]\n", encoding="utf-8")
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "acme.py").write_text(WAITS, encoding="utf-8")
    options = ["--plugins-dir", tmp_path / "plugins", "run", path, "--hang-timeout", "3600"]
    command = [forked.RECD, *options]
    if under_torchrun:
        done = forked.torchrun(command, ranks=1)
    else:
        done = forked.run([*command, "--ranks", "1"])
    assert "<4320>" in done.stdout, done.stderr
