"""Reports on the data of a run: stalls and what to do about them, and groups of samples."""

from __future__ import annotations

import pickle

import pytest
from rich.console import Console

from recd_plugins.data.stalls import Stalls
from recd_plugins.interfaces.batch import STALL_CAUSES, MakingTimes
from recd_plugins.training import result
from recd_plugins.training.result import (
    MIXED,
    GroupCount,
    GroupReport,
    StallReport,
)


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "available_cores", lambda: 8)


def stalls(
    *waited: float, training: float = 1.0, making: float = 0.0, arrival: float = 0.0
) -> Stalls:
    """A trainer that trains ``training`` seconds a step and waits so many, by cause."""
    seconds = dict(zip(STALL_CAUSES, waited, strict=True))
    return Stalls(
        steps=10,
        step_seconds=training + sum(waited),
        seconds=seconds,
        making=MakingTimes(fill=making, transfer=arrival, arrival=arrival),
    )


def report(*ranks: Stalls, workers: int = 0, ingestion: str | None = None) -> StallReport:
    found = StallReport.of(ranks, workers, ingestion=ingestion)
    assert found is not None
    return found


def test_mean_and_worst_rank() -> None:
    found = report(stalls(0.0, 0.0, 1.0, 0.0), stalls(2.0, 0.0, 1.0, 0.0))
    assert found.mean_shares() == {
        "fill": pytest.approx(0.25),
        "convert": 0.0,
        "preprocess": pytest.approx((1 / 2 + 1 / 4) / 2),
        "transfer": 0.0,
    }
    assert found.share == pytest.approx((0.5 + 0.75) / 2)
    assert (found.worst_rank, found.worst.share) == (1, 0.75)
    written = found.as_json()
    assert written["worst"]["rank"] == 1
    assert written["worst"]["shares"]["fill"] == 0.5
    assert [rank["step_seconds"] for rank in written["ranks"]] == [2.0, 4.0]


def test_a_run_too_short_for_one_rank_has_none() -> None:
    assert StallReport.of([stalls(0.0, 0.0, 0.0, 0.0), None], 0) is None
    assert StallReport.of([None], 0) is None


def test_workers_that_would_do() -> None:
    found = report(stalls(0.5, 0.5, 2.0, 0.0, making=3.0))
    assert found.readers == 3
    assert found.as_json()["readers_needed"] == 3
    advice = found.advice()
    assert "75% of a step" in advice
    assert "preprocess" in advice
    assert "training.workers: 3" in advice
    assert "ingestion" not in advice


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
