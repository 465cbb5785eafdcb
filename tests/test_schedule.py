"""What runs by day is some of all, all of it within days, and patterns are of tests."""

from __future__ import annotations

import re
from functools import cache
from itertools import chain, product
from pathlib import Path

import pytest
from tests import covering
from tests.covering import cells_of_today, of_today
from tests.schedule import BENCHMARKS, BY_NIGHT, IN_TURN, RAY, SLOW, TOGETHER_IN_TURN

ROOT = Path(__file__).parents[1]


@cache
def tests_of_files() -> dict[Path, list[str]]:
    """Names of tests by file; any may have those of the contracts, too."""
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/**/test_*.py")]
    contracts = ROOT.glob("src/recd_plugins/testing/contracts/*.py")
    inherited = [test for file in contracts for test in names_in(file)]
    return {file: [*names_in(file), *inherited] for file in files}


def names_in(file: Path) -> list[str]:
    return re.findall(
        r"^ *(?:def )?(test_\w+)(?:\(| =)", file.read_text(encoding="utf-8"), re.MULTILINE
    )


@pytest.mark.parametrize(
    "pattern",
    sorted({*SLOW, *BY_NIGHT, *chain(*IN_TURN.values()), *TOGETHER_IN_TURN, *RAY, *BENCHMARKS}),
)
def test_it_is_of_a_test(pattern: str) -> None:
    files, _, start = pattern.partition("::")
    start, is_cell, _ = start.partition("[")
    assert any(
        test == start if is_cell else test.startswith(start)
        for file, tests in tests_of_files().items()
        if file.match(files)
        for test in tests
    )


@pytest.fixture(autouse=True)
def _by_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covering, "by_night", lambda: False)


@pytest.mark.parametrize("first_day", [0, 3])
def test_each_has_its_day(monkeypatch: pytest.MonkeyPatch, first_day: int) -> None:
    days = []
    for day in range(739_941, 739_945):
        monkeypatch.setenv("RECD_DAY", str(day))
        days.append(list(of_today(range(10), 4, first_day)))
    assert sorted(number for some in days for number in some) == list(range(10))
    assert {len(some) for some in days} == {2, 3}
    monkeypatch.setenv("RECD_DAY", "all")
    assert list(of_today(range(10), 4)) == list(range(10))


def test_cells_meet() -> None:
    cells = list(product("ab", "cde", "fg"))
    assert len(cells_of_today(cells, 1)) == 3
    in_pairs = cells_of_today(cells, 2)
    assert len(in_pairs) < len(cells)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert {(cell[one], cell[other]) for cell in in_pairs} == {
            (cell[one], cell[other]) for cell in cells
        }
    assert cells_of_today(cells[1:], 2) == cells[1:], "no full matrix"
