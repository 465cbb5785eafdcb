from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import commands
from tests.covering import of_today

from recd_plugin_flexshard.run_report import TierReport
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.result import Result
from recd_plugins.training.trainer import Job, train

from .conftest import ELSEWHERE, SEQUENCES, MakeRegistry

#: Both kinds of copies, of many rows.
THREE = {"plan_for": ELSEWHERE, "dedupe": "none"}


def train_under_each(
    rank: int, world_size: int, path: Path, overrides: dict[str, Any], shardings: list[str]
) -> list[Result]:
    jobs = [Job(path, "baseline", overrides=overrides), Job(path, overrides=overrides)]
    jobs += [Job(path, overrides=overrides, sharding=name) for name in shardings]
    return [train(rank, world_size, job) for job in jobs]


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_training_stays_what_it_was(make_registry: MakeRegistry, optimizer: str) -> None:
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
    assert all(tier.observed for tier in report.tiers)


def recd(*arguments: Any) -> tuple[str, dict[str, Any]]:
    path = Path(arguments[1]).with_name("report.json")
    return commands.recd(*arguments, "--json", path), json.loads(path.read_text())


def test_the_plan_shows_tiers(make_registry: MakeRegistry) -> None:
    # Sums of touched rows alone are so cheap that every row of these tables has copies.
    words, found = recd("plan", make_registry("flexshard.three_tier", {**THREE, "sync": "dense"}))
    report = found["plugins"]
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


def test_a_plan_for_a_cluster_takes_the_tiers_of_that_cluster(make_registry: MakeRegistry) -> None:
    path = make_registry("flexshard.joint", {"minimise": "bytes", "dedupe": "none"})
    rows = []
    for nodes in (1, 4):
        _, found = recd("plan", path, "--topology", "zionex-a100-40g", "--nodes", nodes)
        tables = [each for each in found["plugins"]["tables"] if "hot_rows" in each]
        rows.append({each["name"]: (each["hot_rows"], each["flex_rows"]) for each in tables})
    assert rows[0] != rows[1]
    assert not any(flex for _, flex in rows[0].values())
    assert any(flex for _, flex in rows[1].values())


def test_tiers_are_counted_next_to_their_prediction(make_registry: MakeRegistry) -> None:
    use, stock = "flexshard.three_tier", "torchrec.row_wise"
    options = {"plan_for": ELSEWHERE, "profile_rows": None, "retier_every": 6, "sync": "dense"}
    entry = {"use": use, "tables": SEQUENCES[:2], "options": options}
    training = {"learning_rate": 0.02, "eps": 1e-3, "steps": 8}
    # Unlike means, whose equal gradients are sent once.
    pooling = [{"use": "recd.attention", "features": ["seq_*"]}]
    sections = {"converter": {"use": "recd.kjt"}, "training": training, "pooling": pooling}
    path = make_registry("", sharding=[entry], **sections)
    words, report = recd("run", path, f"--sharding={use}", f"--sharding={stock}")
    assert report["loss_max_abs_diff"][stock] < 1e-6
    row_wise, tiered = (report["shardings"][name] for name in (stock, use))
    assert "tiers" not in row_wise
    found = tiered["tiers"]
    tiers = found["tiers"]
    assert [tiers[name]["group"] for name in tiers] == ["global", "global", "node", "cross"]
    # Gradients of copies have the size of the copies, whatever the batch.
    assert tiers["hot"]["ratio"] == tiers["flex_gradients"]["ratio"] == 1
    assert found["other_tables"] == SEQUENCES[2:]
    # The bags send the same under both.
    exchanged = tiers["cold"]["observed"] + tiers["flex"]["observed"]
    bags = tiered["collective_bytes"]["all_to_all"] - exchanged
    sent = row_wise["collective_bytes"]["all_to_all"] - bags
    # Counted in one step, whose 128 rows have other ids than the mean that is predicted.
    fewer = sent / found["row_wise"]
    assert fewer == pytest.approx(1, abs=0.2)
    assert tiers["cold"]["ratio"] == pytest.approx(fewer, rel=0.2)
    assert tiers["flex"]["ratio"] == pytest.approx(fewer, rel=0.2)
    left = tiers["cold"]["observed"] / found["plain_row_wise"]
    assert found["a2a_reduction"]["observed"] == pytest.approx(1 - left)
    for each in (f"{use}, tiers of rows", "flex gradients", "across nodes"):
        assert each in words
    (moved,) = found["retierings"]
    assert moved["step"] == 6
    assert 0 <= moved["a2a_share_after"] <= moved["a2a_share_before"] <= 1
