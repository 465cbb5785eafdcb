"""What runs by day is some of all, and all of it within days."""

from __future__ import annotations

from itertools import product

import pytest
from tests import covering
from tests.covering import cells_of_today, of_today


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
