from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.commands import invoke

from recd_plugin_flexshard.tests.conftest import MakeRegistry

TOPOLOGY = ["--topology", "zionex-a100-40g", "--nodes", "2", "--ranks-per-node", "4"]


@pytest.fixture(autouse=True)
def folder(make_registry: MakeRegistry, cwd: Path) -> Path:
    make_registry("flexshard.three_tier", {"sync": "dense"})
    return cwd


simulate = partial(invoke, "simulate", "registry.yaml", *TOPOLOGY)


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
    assert "Lower --steps" in simulate("--data", "--steps", "90").output
