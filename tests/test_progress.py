"""Progress bars of commands."""

from __future__ import annotations

import pytest

from recd_plugins.report.progress import progress_bars


@pytest.mark.parametrize("expected", [1000, None, 10])
def test_bars_end_full_when_the_work_ends_well(capsys, expected):
    with progress_bars() as add_bar:
        add_bar("reading", expected)(100)
    assert "100/100" in capsys.readouterr().err


def test_bars_stay_where_the_work_broke_off(capsys):
    def work() -> None:
        with progress_bars() as add_bar:
            add_bar("reading", 1000)(100)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert "100/1000" in capsys.readouterr().err
