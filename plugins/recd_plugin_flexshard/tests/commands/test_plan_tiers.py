from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands import recd, refusal

from recd_plugin_flexshard.tests.conftest import ROWS, MakeRegistry


@pytest.fixture(autouse=True)
def folder(make_registry: MakeRegistry, cwd: Path) -> Path:
    training = {"batch_size": 64, "ranks": 2, "ranks_per_node": 1}
    make_registry("flexshard.three_tier", training=training)
    return cwd


PLAN = ["plan", "registry.yaml", "--tiers"]


def test_tiers_for_a_cluster(folder: Path) -> None:
    options = ["--topology", "zionex-a100-40g", "--batch-size", "128", "--json", "tiers.json"]
    shown = " ".join(recd(*PLAN, *options).split())
    assert "32 ranks on cuda" in shown
    assert "128 rows per rank; speed of collectives: as measured" in shown
    assert "t_seq_0_0" in shown
    assert "sharding[0] flexshard.three_tier: M = 6, c = 1, minimises time" in shown
    report = json.loads((folder / "tiers.json").read_text())
    assert report["batch_size"] == 128
    (entry,) = report["entries"]
    assert (entry["plugin"], entry["strategy"]) == ("flexshard.three_tier", "three_tier")
    assert all(table["rows"] == ROWS for table in entry["tables"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--batch-size", "auto"], 2, "--tiers plans for a fixed batch size"),
        (["--nodes", "1"], 1, "sharding[0]: sharding plugin 'flexshard.three_tier' needs several"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], code: int, message: str) -> None:
    assert message in refusal(*PLAN, *arguments, code=code)


def test_without_an_entry_that_has_tiers(make_registry: MakeRegistry) -> None:
    make_registry("torchrec.row_wise")
    assert "Add an entry that uses 'flexshard.two_tier'" in refusal(*PLAN)
