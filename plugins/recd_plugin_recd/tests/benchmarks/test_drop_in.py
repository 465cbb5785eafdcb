"""Trainers that exist take three lines, and train what they trained."""

from __future__ import annotations

import math
from difflib import unified_diff

import pytest
from hypothesis import settings
from tests.benchmarks.tiny import tiny

from recd_plugin_recd.benchmarks import drop_in
from recd_plugin_recd.benchmarks.drop_in_parts.ranks import (
    Job,
    Measured,
    losses_one_rounding_off,
    measure,
)
from recd_plugin_recd.benchmarks.drop_in_parts.three_lines import (
    NAMES,
    Side,
    changed,
    changes,
    diff,
    source,
)
from recd_plugin_recd.benchmarks.drop_in_parts.trainers.session_data import Size
from recd_plugins.testing.benchmark import Findings
from recd_plugins.testing.gloo import run_on_ranks


@pytest.mark.parametrize("name", NAMES)
def test_three_lines_and_an_import_differ(name: str) -> None:
    pooled = 3 if name == "hstu_pooled" else 0
    assert [old == "" for old, _ in changes(name)] == [True] + [False] * (3 + pooled)
    assert "recd_plugins." not in source(name).replace("recd_plugin_recd", "")
    lines = source(name).splitlines(), changed(name).splitlines()
    file = f"{name.removesuffix('_pooled')}.py"
    assert diff(name).splitlines() == list(unified_diff(*lines, file, file, lineterm="", n=0))


def test_losses_are_those_of_stock() -> None:
    figures = {figure["figure"]: figure["value"] for figure in tiny("drop_in")["figures"]}
    losses = {name: value for name, value in figures.items() if "_loss_" in name}
    assert losses.keys() == {
        f"{name}_loss_max_abs_diff{of}"
        for name in ("golden", "dlrm_main", "dlrm_main_qcomms", "hstu", "hstu_pooled")
        for of in ("", "_of_one_rounding")
    } | {"nothing_to_dedup_loss_max_abs_diff"}
    assert all(value <= 1e-6 for value in losses.values()), losses


def test_it_says_what_is_left_alone() -> None:
    notes = tiny("drop_in")["notes"]
    assert any(
        note.startswith("golden: ") and "1.0 ids per row and feature" in note for note in notes
    )
    assert any(note.startswith("dlrm_main: ") and "ids per stored id" in note for note in notes)
    assert any("batch.histories: left alone" in note for note in notes)
    assert any(
        note.startswith("nothing_to_dedup: ") and "left alone, as it has 1." in note
        for note in notes
    )


@pytest.mark.parametrize("name", NAMES)
def test_losses_of_fifty_steps_are_those_of_stock(name: str) -> None:
    if settings.get_current_profile_name() != "nightly":
        pytest.skip("by night; recd bench drop_in compares 55 steps, too")
    found = run_on_ranks(measure, 2, Job(name, Size(64, 50, 1000, 16, 16), 12, 4, 10))[0]
    assert len(found["stock"].losses) == 50
    assert found["ours"].losses == pytest.approx(found["stock"].losses, abs=1e-6)


def test_one_rounding_is_another_trainer() -> None:
    job = Job("dlrm_main", Size(64, 20, 1000, 16, 16), 12, 1, 10)
    losses = run_on_ranks(losses_one_rounding_off, 2, job)[0]
    stock = run_on_ranks(measure, 2, job)[0]["stock"].losses
    assert losses != stock
    assert losses == pytest.approx(stock, abs=1e-5)


def test_a_loss_that_is_none_is_seen() -> None:
    """Also behind another that differs."""
    ours = Measured([1.0], [1.0], losses=[0.5, math.nan])
    stock = Measured([1.0], [1.0], losses=[0.4, 0.5])
    job = Job("golden", Size(64, 20, 1000, 16, 16), 12, 1, 1)
    sides: dict[Side, Measured] = {"stock": stock, "ours": ours}
    with pytest.raises(ValueError, match="golden_loss_max_abs_diff: a sample is nan"):
        drop_in._trained("golden", job, sides, [0.4, 0.5], Findings([], [], []))
    with pytest.raises(ValueError, match="nothing_to_dedup_loss_max_abs_diff: a sample is nan"):
        drop_in._nothing_to_dedup(sides, Findings([], [], []))
