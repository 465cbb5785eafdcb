"""Runs with folders of their own: train, compare, resume and score them without a registry."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from recd_plugins.cli import main

REGISTRY = """\
version: 1
dataset: {use: dlrm.random, options: {rows: 256, test_rows: 64, sparse: {a: 50}}}
converter: {use: recd.kjt}
model: {embedding_dim: 4, num_embeddings: 50}
training: {device: cpu, batch_size: 32, checkpoint: {runs: runs/r, every: 4}}
"""


def recd(*words: str) -> str:
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_train_compare_and_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(REGISTRY)
    recd("run", "r.yaml", "--steps", "4")
    recd("run", "r.yaml", "model.embedding_dim=8")
    shown = recd("run", "r.yaml", "--seeds", "2")
    assert "mean" in shown
    assert "runs/r/4" in shown
    recd("run", "r.yaml", "--resume", "--run", "1")  # without the --steps of its start
    rows = json.loads(recd("runs", "r.yaml", "--json", "-"))
    assert [row["steps"] for row in rows] == [8] * 4
    assert [row["settings"]["model.embedding_dim"] for row in rows] == ["4", "8", "4", "4"]
    assert [row["settings"]["training.seed"] for row in rows] == [None, None, "0", "1"]
    losses = [row["test"]["log_loss"] for row in rows]
    assert losses[0] == losses[2] != losses[3]
    (best,) = [i for i, row in enumerate(rows) if row["best"]]
    entropies = [row["test"]["normalized_entropy"] for row in rows]
    assert entropies[best] == min(entropies)

    Path("r.yaml").unlink()
    for run in ("2", "3"):
        evaluated = json.loads(recd("evaluate", f"runs/r/{run}", "--json", "-"))
        assert evaluated["test"]["log_loss"] == pytest.approx(losses[int(run) - 1], abs=1e-6)
    shown = recd("runs", "runs/r", "--metric", "auc")
    assert "best auc: runs/r/" in shown
    assert recd("report", "runs/r").startswith(f"runs/r.html: runs/r/{best + 1}, ")
    assert "<td>model.embedding_dim</td>" in Path("runs/r.html").read_text()
    recd("embeddings", "runs/r", "t_a", "-o", "rows.parquet")
    assert pq.read_table("rows.parquet").num_rows == 50
