"""Metrics see the samples of all ranks; what they return is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.training import metric_cases as cases

from recd_plugins.testing.gloo import run_on_ranks

SAID = {
    "taken": ":5 metrics[0]: acme.wrong: log_loss is measured already",
    "results": "acme.wrong: results failed at ",
    "twice": ":6 metrics[1]: acme.wrong: error_rate is measured already",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Registry files by fault."""
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "plugins").mkdir()
    (folder / "plugins" / "acme.py").write_text(cases.METRIC)
    for fault in (*SAID, ""):
        entry = f"  - {{use: acme.wrong, options: {{fault: '{fault}'}}}}\n"
        (folder / f"{fault}.yaml").write_text(
            "version: 1\n"
            "dataset: {use: dlrm.random, options: {rows: 64, sparse: {user: 9}}}\n"
            "converter: {use: recd.kjt}\n"
            f"metrics:\n{entry * (1 + (fault == 'twice'))}"
        )
    return folder


def test_samples_of_all_ranks_count(folder: Path) -> None:
    for found in run_on_ranks(cases.results, 3, folder, [""], 2):
        assert found == [{"error_rate": 3 / 8}]  # 2 of 4, then 1 of 4


def test_a_fault_is_told_on_every_rank(folder: Path) -> None:
    for found in run_on_ranks(cases.results, 2, folder, list(SAID), 1):
        for result, said in zip(found, SAID.values(), strict=True):
            assert said in str(result)
