from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli import programs
from tests.plugin_files import write_plugins
from tests.small_registry import random_rows, write_registry
from tests.training.test_evaluation import METRIC


def write(folder: Path, optimizer: str = "adagrad", size: int = 4, **more: Any) -> Path:
    write_plugins(folder, METRIC, "Wrong")
    adagrad = {"use": f"torchrec.{optimizer}", "tables": ["t_user"]}
    return write_registry(
        folder,
        dataset=random_rows(256, test_rows=64, sparse={"user": 9, "item": 90}),
        converter={"use": "recd.ikjt"},
        optimizers=[{**adagrad, "options": {"learning_rate": 0.1}}],
        metrics=[
            {"use": "acme.wrong"},
            {"use": "torchrec.rec_metrics", "options": {"names": ["ne", "accuracy"]}},
        ],
        model={"embedding_dim": size, "bottom_mlp": [size]},
        training={
            "ranks": 2,
            "steps": 8,
            "device": "auto" if size == 4 else "cpu",
            "checkpoint": {} if size == 4 else {"path": f"{folder}/checkpoints"},
        },
        **more,
    )


def run(registry: Path, *options: str) -> Any:
    report = registry.parent / "report.json"
    done = programs.run_with_plugins(registry, "--json", report, *options)
    return done, json.loads(report.read_text())


def test_they_are_what_stock_torchrec_trains(tmp_path: Path) -> None:
    done, report = run(write(tmp_path), "--compare", "-v")
    assert report["loss_max_abs_diff"] <= 1e-6
    test = report["plugins"]["test"]
    assert report["baseline"]["test"] == pytest.approx(test, rel=1e-5)
    assert test["num_samples"] == 64
    assert test["ne"] == pytest.approx(test["normalized_entropy"], rel=1e-9)
    assert test["error_rate"] == pytest.approx(1 - test["accuracy"])
    assert "exact_adagrad, lr 0.1" in done.stderr
    assert "exact_row_wise_adagrad, lr 0.02" in done.stderr
    assert "test error rate" in done.stdout


def test_scores_take_no_optimizer(tmp_path: Path) -> None:
    """As of a model that a GPU trained by Adam, which FBGEMM lacks on the CPU; split otherwise."""
    _, trained = run(write(tmp_path, size=8))
    split = {"use": "torchrec.column_wise", "tables": ["t_item"]}
    registry = write(tmp_path, "adam", size=8, sharding=[split])
    plugins, report = tmp_path / "plugins", tmp_path / "scores.json"
    done = programs.recd("--plugins-dir", plugins, "evaluate", registry, "--json", report)
    assert done.returncode == 0, done.stderr
    assert json.loads(report.read_text())["test"] == pytest.approx(trained["test"], rel=1e-6)
