"""Groups of samples: counted on all ranks, next to what was expected."""

from __future__ import annotations

import pickle

from rich.console import Console

from recd_plugins.training.group_report import MIXED, GroupCount, GroupReport


def count(*batches: dict[str, int]) -> GroupCount:
    counted = GroupCount()
    for groups in batches:
        counted.add(groups)
    return counted


HOT, NORMAL, BOTH = {"hot": 4}, {"normal": 4}, {"hot": 1, "normal": 3}


def test_shares_batches_and_steps_of_all_ranks() -> None:
    ranks = [count(HOT, HOT, NORMAL, NORMAL), count(HOT, NORMAL, BOTH, NORMAL)]
    report = GroupReport.of(ranks, {"hot": 0.4, "normal": 0.6})
    assert report is not None
    found = report.as_json()
    assert {name: (g["samples"], g["batches"], g["steps"]) for name, g in found.items()} == {
        "hot": (13, 3, 1),
        "normal": (19, 4, 1),
        MIXED: (0, 1, 0),
    }
    assert found["hot"]["share"] == 13 / 32
    assert (found["hot"]["expected"], found[MIXED]["expected"]) == (0.4, None)
    console = Console(width=100, record=True)
    console.print(report.table("of a run"))
    shown = console.export_text()
    assert "samples by group of a run" in shown
    assert "40.6%" in shown
    assert "40.0%" in shown


def test_a_rank_tells_few_bytes_of_many_steps() -> None:
    ranks = [count(*[HOT, HOT, NORMAL] * 2), count(*[HOT] * 4, NORMAL, NORMAL)]
    assert [*ranks[0].steps] == ["hot", "hot", "normal"] * 2
    report = GroupReport.of(ranks, {})
    assert report is not None
    assert {name: g["steps"] for name, g in report.as_json().items()} == {
        "hot": 3,
        "normal": 1,
        MIXED: 0,
    }
    assert len(pickle.dumps(count(*[HOT, NORMAL] * 50_000))) < 201_000


def test_a_run_without_groups_has_no_report() -> None:
    assert GroupReport.of([count({}), count({})], {}) is None
