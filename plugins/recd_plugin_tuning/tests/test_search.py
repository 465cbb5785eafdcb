"""The search of ``auto`` over given evaluations, and the report of what it chose."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recd_plugin_tuning.auto import Chosen, Evaluations, Group, best_choices, entry_line
from recd_plugins.config.document import read_yaml
from recd_plugins.interfaces import Candidate, Evaluation, Offered, Table
from recd_plugins.interfaces.step_cost import AllToAllCost, StageCosts, StageTimes, StepCost

TIERS = Candidate("acme.tiers", {})
TWICE = Candidate("acme.tiers", {"budget": "2x"})
SEQUENCES = Group((Table("t", ("f",), 100, 8, pooled=False),), (TIERS, TWICE))

#: Seconds of a step: in haste, and as training plans it.
Told = dict[Candidate | None, tuple[float, float]]


def found(told: Told) -> Candidate | None:
    def evaluate(offered: Offered, *, fast: bool = False) -> Evaluation:
        hasty, settled = told[offered[0][0] if offered else None]
        times = StageTimes(0.0, 0.0, hasty if fast else settled, 0.0, 0.0)
        return Evaluation(times, without=lambda _: StageTimes(0.0, 0.0, 0.0, 0.0, 0.0))

    question: Any = SimpleNamespace(evaluate=evaluate)
    (choice,) = best_choices(Evaluations(question, [SEQUENCES]), [SEQUENCES])
    return choice


def test_what_is_best_is_found() -> None:
    assert found({None: (1.0, 1.0), TIERS: (0.5, 0.5), TWICE: (0.4, 0.4)}) == TWICE


def test_what_saves_little_is_not_worth_it() -> None:
    assert found({None: (1.0, 1.0), TIERS: (0.5, 0.5), TWICE: (0.49, 0.49)}) == TIERS
    assert found({None: (1.0, 1.0), TIERS: (0.98, 0.98), TWICE: (0.98, 0.98)}) is None


def test_what_saved_enough_in_haste_alone_is_not_kept() -> None:
    assert found({None: (1.0, 1.0), TIERS: (0.5, 0.5), TWICE: (0.45, 0.495)}) == TIERS
    assert found({None: (1.0, 1.0), TIERS: (0.9, 0.99), TWICE: (0.95, 0.99)}) is None


COSTS = StageCosts(all_to_all=AllToAllCost(bytes_across_nodes=1e-9, collectives=0.1))


@pytest.mark.parametrize(
    ("all_to_all", "links", "waiting"),
    [
        (1.6, 1500.0, None),  # half a second of bytes is carried while ranks compute
        (2.1, 2000.0, None),
        (2.5, 2000.0, 400.0),
    ],
)
def test_it_comes_to_the_step(all_to_all: float, links: float, waiting: float | None) -> None:
    seconds = StageTimes(lookup=0.1, gemm=0.0, all_to_all=all_to_all, all_reduce=0.2, other=0.3)
    work = StepCost(bytes_across_nodes=2e9, collectives=1)
    found = Chosen((), (), (), seconds, work, None, COSTS, 1).limits()
    assert found["links between nodes"] == pytest.approx(links)
    waited = found.get("waiting for the rank with the most to do", 0.0)
    assert waited == pytest.approx(waiting or 0.0, abs=1e-6)
    assert sum(found.values()) == pytest.approx(1e3 * seconds.total)


def test_names_of_any_letters_are_read_back(tmp_path: Path) -> None:
    names = ["t_straße", "t_🎬", 't_"quoted"']
    line = entry_line(Candidate("acme.halves", {"first": names}), names)
    (tmp_path / "r.yaml").write_text(f"sharding:\n{line}\n", encoding="utf-8")
    assert read_yaml(tmp_path / "r.yaml").data["sharding"] == [
        {"use": "acme.halves", "tables": names, "options": {"first": names}}
    ]
