"""`recd simulate` as a user runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from tests.cli.plan_cases import invoked

from recd_plugin_flexshard.tests.conftest import ROWS, SEQUENCES, MakeRegistry
from recd_plugins.interfaces.access import AccessProfile, TableAccess

TOPOLOGY = ["--topology", "zionex-a100-40g", "--nodes", "2", "--ranks-per-node", "4"]


@pytest.fixture(autouse=True)
def folder(make_registry: MakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_registry("flexshard.three_tier", {"sync": "dense"})
    return tmp_path


def simulate(*arguments: str) -> Result:
    return invoked("simulate", *TOPOLOGY, *arguments)


def report(*arguments: str) -> dict[str, Any]:
    result = simulate(*arguments, "--json", "s.json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(Path("s.json").read_text())
    assert found["topology"]["world_size"] == 8
    return {**found["entries"]["sharding[0]"], "output": " ".join(result.stdout.split())}


def test_drawn_batches() -> None:
    entry = report("--batch-size", "64", "--steps", "2")
    assert "sharding[0], three_tier: tables: 3, steps: 2 of 64 rows" in entry["output"]
    assert entry["tiered"]["tiers"].keys() == {"cold", "hot", "flex", "flex_gradients"}
    reduction = entry["a2a_reduction"]
    assert reduction["simulated"] == pytest.approx(reduction["predicted"], abs=0.03)


def test_real_batches() -> None:
    entry = report("--data", "--steps", "2")
    assert "batches of registry.yaml" in entry["output"]
    # Deduplicated rows are not looked up twice.
    assert entry["tiered"]["lookups"]["mean"] < entry["row_wise"]["lookups"]["mean"] / 2
    assert "play fewer steps" in simulate("--data", "--steps", "90").output


def test_accesses_that_have_changed(folder: Path) -> None:
    tables = {
        name: TableAccess.from_counts(
            name,
            (name[2:], "x"),
            ROWS,
            samples=1,
            rows=np.arange(ROWS),
            accesses=np.full(ROWS, 0.1),
        )
        for name in SEQUENCES
    }
    AccessProfile(tables, "flat").save(folder / "p.parquet")
    result = simulate(*TOPOLOGY, "--profile", "p.parquet", "--json", "s.json")
    assert result.exit_code == 0, result.output
    reduction = json.loads((folder / "s.json").read_text())["entries"]["sharding[0]"]
    assert reduction["a2a_reduction"]["simulated"] < reduction["a2a_reduction"]["predicted"] - 0.01
    lists = (folder / "s.json").read_text()
    more = {name: replace(table, features=(*table.features, "x")) for name, table in tables.items()}
    AccessProfile(more, "flat").save(folder / "p.parquet")
    assert simulate(*TOPOLOGY, "--profile", "p.parquet", "--json", "s.json").exit_code == 0
    assert (folder / "s.json").read_text() == lists, "the model has no feature x"
    AccessProfile({"t_seq_0_0": tables["t_seq_0_0"]}, "one").save(folder / "p.parquet")
    assert "does not cover table" in simulate(*TOPOLOGY, "--profile", "p.parquet").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "--profile", "p"], "--data uses real batches"),
        (["--topology", "dgx-h10"], "did you mean dgx-h100?"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, arguments: list[str], message: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
