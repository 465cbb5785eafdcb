"""Runs with folders of their own: train, compare, resume and score them without a registry."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from recd_plugin_runs.runs import differing, settings_of
from recd_plugins.api import run_folders
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


def refused(*words: str) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1, done.output
    return done.stderr


def test_settings_that_replace_a_mapping() -> None:
    found = settings_of("a: {b: {test: 0.1}, c: 1}", ["a.b={from: 3, x: [1]}", "a.c.d=2"])
    assert found == {"training.seed": "0", "a.b.from": "3", "a.b.x": "1", "a.c.d": "2"}


def test_entries_are_compared_by_plugin_and_patterns() -> None:
    a = "{use: s.v, features: [a], options: {rows: 9}}"
    b = "{use: s.v, features: [b, c]}"
    end = "\noptimizers: [{use: t.adam, tables: ['*']}]\ntraining: {learning_rate: 1"
    found = [
        settings_of(f"p: [{a}, {b}]{end}, dense_learning_rate: 2}}", ["p[0].options.rows=8"]),
        settings_of(f"p: [{b}, {a}]{end}}}", ()),
    ]
    assert found[0]["p(s.v a).rows"] == "8"
    rates = [f"training.{name}" for name in ("dense_learning_rate", "learning_rate")]
    assert differing(found) == ["p(s.v a).rows", *rates]


def test_a_resumed_run_has_its_new_settings(cwd: Path) -> None:
    Path("r.yaml").write_text(REGISTRY)
    done = CliRunner().invoke(main, ["run", "r.yaml", "--resume"], catch_exceptions=False)
    assert "runs/r: there is no run to resume, so a new run starts" in done.stderr
    refused("run", "r.yaml", "--resume", "model.embedding_dim=8")
    recd("run", "r.yaml", "--resume", "training.epochs=2")
    assert run_folders.read_settings(Path("runs/r/1")).settings == ("training.epochs=2",)
    shown = recd("run", "r.yaml", "--seeds", "2", "training.validation={every: 4}")
    assert "Test figures are optimistic" in " ".join(shown.split())


def test_train_compare_and_score(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [row["settings"]["training.seed"] for row in rows] == ["0", "0", "0", "1"]
    losses = [row["test"]["log_loss"] for row in rows]
    assert losses[0] == losses[2] != losses[3]
    (best,) = [i for i, row in enumerate(rows) if row["best"]]
    entropies = [row["test"]["normalized_entropy"] for row in rows]
    assert entropies[best] == min(entropies)

    Path("r.yaml").unlink()
    for run in ("2", "3"):
        evaluated = json.loads(recd("evaluate", f"runs/r/{run}", "--json", "-"))
        assert evaluated["test"]["log_loss"] == pytest.approx(losses[int(run) - 1], abs=1e-6)
    by = ("--by", "dense_0", "--by", "a")
    found = json.loads(recd("evaluate", "runs/r/3", *by, "--ranks", "2", "--json", "-"))
    assert found["test"] == pytest.approx(evaluated["test"], abs=1e-6)
    assert [len(found["by"][name]) for name in ("dense_0", "a")] == [10, 1]
    (whole,) = found["by"]["a"]  # every list has 10 ids
    assert (whole["value"], whole["rows"]) == ("10", 64)
    for name in ("log_loss", "positive_rate"):
        mean = sum(each["rows"] * each[name] for each in found["by"]["dense_0"]) / 64
        assert mean == pytest.approx(whole[name], abs=1e-6)
    assert whole["auc"] == pytest.approx(found["test"]["auc"], abs=1e-6)
    rate = found["baselines"]["base_rate"]
    assert rate["calibration"] == pytest.approx(1)  # the dataset does not know its mean label
    entropy = -sum(p * math.log(p) for p in (whole["positive_rate"], 1 - whole["positive_rate"]))
    assert rate["log_loss"] == pytest.approx(entropy)
    assert rate["normalized_entropy"] == pytest.approx(1)
    Path("r.yaml").write_text(REGISTRY)
    shown = recd("evaluate", "r.yaml", "--run", "best", "--by", "a")
    assert "base rate" in shown
    assert "calibration" in shown
    wrong = refused("evaluate", "runs/r/3", "--by", "A")
    assert "--by A: column 'A' is neither a feature nor a key column" in wrong
    assert f"runs/r/{best + 1}, step 8, test split" in shown
    assert recd("report", "runs/r").startswith(f"runs/r.html: runs/r/{best + 1}, ")
    assert "<td>model.embedding_dim</td>" in Path("runs/r.html").read_text()

    recd("run", "r.yaml", "--steps", "2", "training.learning_rate=0.02", "model.bottom_mlp=[8]")
    shown = recd("runs", "runs/r", "--metric", "AUC")
    assert "best AUC of the test split: runs/r/" in shown
    assert max(map(len, shown.splitlines())) <= 100
    monkeypatch.setenv("COLUMNS", "60")
    shown = recd("runs", "runs/r")
    assert max(map(len, shown.partition("best norm")[0].splitlines())) <= 60
    assert "runs 1, 4 differ only in their seed: normalized entropy " in shown
    Path("runs/r/5/result.json").unlink()
    done = CliRunner().invoke(main, ["evaluate", "r.yaml"])
    assert "using runs/r/4, because runs/r/5 has not finished" in done.stderr
    assert all(f"run {number}" in shown for number in range(1, 6))
    assert "training.learning_rate " in shown  # in one line
    assert recd("report", "runs/r/1", "runs/r/2").startswith("runs/r/report.html: runs/r/")
    recd("report", "runs/r/2", "runs/r/1")  # replaces its own page
    wrong = refused("runs", "runs/r", "--metric", "aux")
    assert "no run has metric 'aux'. Did you mean 'auc'?" in wrong
    said = "runs/r/2 is a run folder. Use: recd run r.yaml --resume --run 2"
    assert said in refused("run", "runs/r/2", "--resume")
    assert "runs/r is a folder of runs. Use: " in refused("run", "runs/r")

    Path("r.yaml").write_text(REGISTRY.replace("embedding_dim: 4", "embedding_dim: 16"))
    wrong = refused("evaluate", "r.yaml", "--run", "1")
    assert "model.embedding_dim was 4 and is now 16; " in wrong
    assert "Pass runs/r/1 instead of r.yaml to use the settings of that run." in wrong
    wrong = refused("run", "r.yaml", "--resume", "--run", "1")
    assert "Restore the previous values, or start a new run without --resume." in wrong
    said = "runs/r: there is no run 9. Use an existing run: 1, 2, "
    assert said in refused("evaluate", "runs/r/9")
    for table in ("t_a", "a"):
        recd("embeddings", "runs/r", table, "-o", f"{table}.parquet")
    assert pq.read_table("t_a.parquet").num_rows == 50
    assert pq.read_table("a.parquet").equals(pq.read_table("t_a.parquet"))
