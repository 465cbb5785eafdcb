"""What a run notes of its registry: the file that it began with, and what was set besides."""

from __future__ import annotations

import json
from pathlib import Path

from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.trainer import Job, train

REGISTRY = """version: 1
dataset: {{use: {dataset}, options: {{rows: 64, test_rows: 0, sparse: {{user: 90}}}}}}
converter: {{use: recd.kjt}}
callbacks: [{{use: trackers.jsonl, options: {{path: {folder}/run.jsonl}}}}]
sharding: [{{use: torchrec.table_wise, tables: ["*"]}}]
model: {{embedding_dim: 4, num_embeddings: 100, bottom_mlp: [4], top_mlp: [4]}}
training: {{batch_size: 16, ranks: 1, steps: 3, device: cpu}}
"""


def write(folder: Path, dataset: str = "dlrm.random") -> Path:
    path = folder / "registry.yaml"
    path.write_text(REGISTRY.format(dataset=dataset, folder=folder), encoding="utf-8")
    return path


def test_ranks_have_what_the_run_began_with(tmp_path: Path) -> None:
    path = write(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("steps: 3", "steps: 5"))
    (result,) = run_on_ranks(train, 1, Job(path, text=text))
    assert len(result.losses) == 3
    first, *_ = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert first["registry"] == text
