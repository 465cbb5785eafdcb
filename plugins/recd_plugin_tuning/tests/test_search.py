"""The search of ``auto`` over given evaluations, and the report of what it chose."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recd_plugin_tuning.auto import Evaluations, Group, best_choices, entry_line
from recd_plugins.config.document import read_yaml
from recd_plugins.interfaces import Candidate, Evaluation, Offered, Table
from recd_plugins.interfaces.step_cost import StageTimes

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


def test_names_of_any_letters_are_read_back(tmp_path: Path) -> None:
    names = ["t_straße", "t_🎬", 't_"quoted"']
    line = entry_line(Candidate("acme.halves", {"first": names}), names)
    (tmp_path / "r.yaml").write_text(f"sharding:\n{line}\n", encoding="utf-8")
    entry = {"use": "acme.halves", "tables": names, "options": {"first": names}}
    assert read_yaml(tmp_path / "r.yaml").data["sharding"] == [entry]
