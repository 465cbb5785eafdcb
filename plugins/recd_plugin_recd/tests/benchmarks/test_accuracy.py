"""The accuracy benchmark compares equal samples, and deduplication costs no accuracy."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.benchmarks.tiny import tiny

from recd_plugin_recd.benchmarks import accuracy
from recd_plugins.errors import RecdError
from recd_plugins.interfaces.callback import Quality


def test_both_orders_have_the_same_rows_and_the_test_has_other_sessions(tmp_path: Path) -> None:
    for layout in ("clustered", "interleaved"):
        accuracy.write_table(tmp_path / layout, 4096, 0, layout)
    accuracy.write_table(tmp_path / "test", 1024, 1000, "clustered")
    clustered, interleaved, test = (
        pq.read_table(tmp_path / name) for name in ("clustered", "interleaved", "test")
    )
    assert not clustered.equals(interleaved)
    keys = [("session_id", "ascending"), ("ts", "ascending")]
    assert clustered.sort_by(keys).equals(interleaved.sort_by(keys))
    trained_on = set(clustered["session_id"].to_pylist())
    assert trained_on.isdisjoint(test["session_id"].to_pylist())


def test_it_measures_every_figure() -> None:
    figures = {figure["figure"]: figure for figure in tiny("accuracy")["figures"]}
    assert list(figures) == [
        "papercal_ne_interleaved",
        "papercal_auc_interleaved",
        "papercal_ne_clustered_minus_interleaved",
        "papercal_auc_clustered_minus_interleaved",
        "papercal_ne_shuffled_minus_interleaved",
        "papercal_auc_shuffled_minus_interleaved",
        "papercal_ne_dedup_abs_diff",
        "papercal_auc_dedup_abs_diff",
    ]
    assert 0.9 < figures["papercal_ne_interleaved"]["value"] < 1.1
    assert figures["papercal_ne_dedup_abs_diff"]["max"] < 1e-4
    assert figures["papercal_auc_dedup_abs_diff"]["max"] < 1e-4
    assert figures["papercal_ne_clustered_minus_interleaved"]["value"] != 0


def test_differences_are_those_of_each_seed() -> None:
    def of(ne: float, auc: float) -> Quality:
        return Quality(ne, auc, 100)

    seeds = [
        {"interleaved": of(0.9, 0.7), "clustered": of(0.95, 0.69), "plain": of(0.95, 0.69)},
        {"interleaved": of(0.8, 0.8), "clustered": of(0.79, 0.8), "plain": of(0.78, 0.8)},
    ]
    figures = {figure.figure: figure for figure in accuracy.figures("here", seeds)}
    change = figures["here_ne_clustered_minus_interleaved"]
    assert (change.min, change.max) == pytest.approx((-0.01, 0.05))
    assert figures["here_auc_clustered_minus_interleaved"].min == pytest.approx(-0.01)
    assert figures["here_ne_dedup_abs_diff"].max == pytest.approx(0.01)
    assert not any("shuffled" in name for name in figures)


def test_a_file_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECD_MOVIELENS", str(tmp_path / "ratings"))
    with pytest.raises(RecdError, match=r"ratings is no file; examples/movielens"):
        accuracy.run("small")
