"""Reports on the data of a run: stalls and what to do about them, and groups of samples."""

from __future__ import annotations

import pickle

import pytest
from rich.console import Console

from recd_plugins.data.stalls import Stalls
from recd_plugins.training import data_report
from recd_plugins.training.data_report import (
    MIXED,
    GroupCount,
    GroupReport,
    StallReport,
    stall_advice,
    stall_table,
)
from recd_plugins.values.batch import STALL_CAUSES, MakingTimes


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_report, "available_cores", lambda: 8)


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
        making_deviation=0.0,
        training_deviation=0.0,
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


def test_nothing_to_do() -> None:
    assert report(stalls(0.01, 0.01, 0.01, 0.01)).advice() == ""


def test_workers_that_would_do() -> None:
    found = report(stalls(0.5, 0.5, 2.0, 0.0, making=3.0))
    assert found.readers == 3
    assert found.as_json()["readers_needed"] == 3
    advice = found.advice()
    assert "75% of a step" in advice
    assert "preprocess" in advice
    assert "training.workers: 3" in advice
    assert "ingestion" not in advice


def test_workers_for_which_there_are_no_cores() -> None:
    ranks = [stalls(0.5, 0.5, 2.0, 0.0, making=3.0)] * 4
    advice = report(*ranks).advice()
    assert "8 cores for 4 x (1 + 3) processes" in advice
    assert "an ingestion plugin reads on other machines" in advice


def test_enough_workers_without_cores() -> None:
    advice = report(stalls(1.0, 0.0, 0.0, 0.0, making=3.0), workers=4).advice()
    assert "4 workers would do if each had a core" in advice


def test_an_ingestion_that_has_too_few_readers() -> None:
    found = report(stalls(1.0, 0.0, 0.0, 0.0, making=3.0), ingestion="acme.reads")
    assert "3 readers for each rank would do" in found.advice()
    assert "training.workers" not in found.advice()


def test_readers_do_not_help_against_unpacking() -> None:
    found = report(stalls(0.0, 0.0, 0.0, 0.5, making=1.0, arrival=0.5))
    assert found.readers is None
    assert "more readers do not help" in found.advice()


def test_advice_says_whose_it_is() -> None:
    waits, none = report(stalls(1.0, 0.0, 0.0, 0.0)), report(stalls(0.0, 0.0, 0.0, 0.0))
    assert stall_advice({"baseline": waits, "plugins": none}) == [f"baseline: {waits.advice()}"]
    assert stall_advice({"": waits}) == [waits.advice()]


def test_sides_stand_next_to_each_other() -> None:
    table = stall_table(
        {
            "baseline": report(stalls(1.0, 0.0, 0.0, 0.0)),
            "plugins": report(stalls(0.0, 0.0, 0.0, 0.25)),
        }
    )
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table)
    lines = shown.get().splitlines()
    (fill,) = (line for line in lines if "fill" in line)
    (everything,) = (line for line in lines if " all " in line)
    assert fill.count("50.0%") == 2
    assert everything.count("50.0%") == everything.count("20.0%") == 2


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
