"""``recd run`` and ``recd plan`` of registries with flexshard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.covering import of_today

from recd_plugin_flexshard.run_report import TierReport
from recd_plugin_flexshard.tests.run_cases import train_under_each
from recd_plugins.cli import main
from recd_plugins.testing.gloo import run_on_ranks

from .conftest import ELSEWHERE, SEQUENCES, MakeRegistry

#: Both kinds of copies, of many rows.
THREE = {"plan_for": ELSEWHERE, "dedupe": "none"}


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_training_stays_what_it_was(make_registry: MakeRegistry, optimizer: str) -> None:
    """4 ranks as 2 nodes, against the plain model and against stock shardings of the same file."""
    path = make_registry("flexshard.three_tier", THREE)
    others = ["flexshard.joint", "torchrec.row_wise", "torchrec.data_parallel"]
    if optimizer == "sgd":  # each part of a row has a row-wise Adagrad of its own
        others += ["torchrec.column_wise", "auto"]
    others = list(of_today(others, 3))
    overrides = {"optimizer": optimizer, "learning_rate": 0.1, "eps": 1e-3}
    results = run_on_ranks(train_under_each, 4, path, overrides, others, local_world_size=2)[0]
    plain, tiered, *_ = results
    assert max(plain.losses) - min(plain.losses) > 1e-4  # it learns
    for result, name in zip(results[1:], ["flexshard.three_tier", *others], strict=True):
        assert np.abs(np.subtract(result.losses, plain.losses)).max() <= 1e-6, name
    for result, name in zip(results[2:], others, strict=True):
        assert ("auto" in result.sections) == (name == "auto")
    report = tiered.sections["tiers"]
    assert isinstance(report, TierReport)
    sent = {tier.tier: tier.observed for tier in report.tiers}
    assert all(sent.values()), sent


def recd(*arguments: Any) -> str:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_plan_shows_tiers(make_registry: MakeRegistry, tmp_path: Path) -> None:
    # Sums of touched rows alone are so cheap that every row of these tables has copies.
    path = make_registry("flexshard.three_tier", {**THREE, "sync": "dense"})
    words = recd("plan", path, "--json", tmp_path / "plan.json")
    report = json.loads((tmp_path / "plan.json").read_text())["plugins"]
    tables = {table["name"]: table for table in report["tables"]}
    for name in SEQUENCES:
        table = tables[name]
        assert table["sharding_type"] == "row_wise"
        assert f"{table['hot_rows']:,} hot" in words
        assert f"{table['flex_rows']:,} flex" in words
        assert 0 < table["cold_share"] < 1
    assert "cold_share" not in tables["t_item_0"]
    assert "copies of rows" in words
    assert min(report["memory_bytes"]["by_rank"]["copies of rows"]) > 0


def test_a_plan_for_a_cluster_takes_the_tiers_of_that_cluster(
    make_registry: MakeRegistry, tmp_path: Path
) -> None:
    path = make_registry("flexshard.joint", {"minimise": "bytes", "dedupe": "none"})
    rows = []
    for cluster in (["--nodes", 1], ["--nodes", 4]):
        recd(
            "plan", path, "--topology", "zionex-a100-40g", *cluster, "--json", tmp_path / "p.json"
        )  # fmt: skip
        tables = json.loads((tmp_path / "p.json").read_text())["plugins"]["tables"]
        rows.append(
            {
                table["name"]: (table["hot_rows"], table["flex_rows"])
                for table in tables
                if "hot_rows" in table
            }
        )
    assert rows[0] != rows[1]
    assert not any(flex for _, flex in rows[0].values())
    assert any(flex for _, flex in rows[1].values())
