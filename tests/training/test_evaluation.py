"""Evaluation sees every row once, whatever does not fill a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import evaluation_cases as cases

from recd_plugins.testing.gloo import run_on_ranks

ROWS = {"long": 45, "short": 5}
CASES = {
    f"{test}-{converter}-{workers}": (test, converter, workers)
    for test, converter, workers in [
        ("long", "recd.kjt", 0),
        ("long", "recd.ikjt", 0),
        ("long", "recd.ikjt", 1),
        ("short", "recd.ikjt", 0),
    ]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    cases.write_table(folder / "train" / "a.parquet", 32)
    for name, num_rows in ROWS.items():
        cases.write_table(folder / name / "a.parquet", num_rows)
    (folder / "plugins").mkdir()
    (folder / "plugins" / "acme.py").write_text(cases.SESSIONS)
    for case, (test, converter, workers) in CASES.items():
        text = cases.REGISTRY.format(
            folder=folder, test=folder / test, converter=converter, workers=workers
        )
        (folder / f"{case}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_row_is_scored_once(folder: Path, world_size: int) -> None:
    for of_rank in run_on_ranks(cases.evaluated, world_size, folder, list(CASES)):
        for (test, _, _), found in zip(CASES.values(), of_rank, strict=True):
            _check(found, ROWS[test])


def test_an_evaluation_is_no_step_to_kernels(folder: Path) -> None:
    case = next(iter(CASES))
    ((before, after),) = run_on_ranks(cases.counted, 1, folder, case)
    assert before == after
    assert before
    assert min(before) >= 2


def _check(found: dict[str, Any], num_rows: int) -> None:
    logits, labels = (each.double() for each in found["pair"])
    assert len(labels) == len(logits.unique()) == num_rows  # of ties an order decides
    assert found["num_samples"] == found["rows"] == num_rows
    assert found["sessions"] == -(-num_rows // 3)
    higher = (logits[labels == 1, None] - logits[labels == 0]).sign()
    assert found["auc"] == pytest.approx(float((higher.mean() + 1) / 2), abs=1e-6)
    entropy = torch.nn.functional.binary_cross_entropy
    of_base = entropy(torch.full_like(labels, float(labels.mean())), labels)
    ne = entropy(logits.sigmoid(), labels) / of_base
    assert found["normalized_entropy"] == pytest.approx(float(ne), rel=1e-5)
