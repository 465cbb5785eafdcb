"""Counts what became of bad inputs, and shows it with ``--fuzz-report FILE``."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.oracle import Outcome

_PROPERTY = "fuzz"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-report", metavar="FILE", help="Write the outcomes of each kind of bad input here."
    )


def pytest_configure(config: pytest.Config) -> None:
    # Workers of xdist send their reports to the process that counts.
    if config.getoption("--fuzz-report", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Count(Path(config.getoption("--fuzz-report", None))))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torchrec logs whole models at each start of a run."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """The outcomes of the cases of this test's kind."""
    counts: Counter[str] = Counter()
    yield counts
    kind = (
        f"{request.module.__name__.rpartition('.test_')[2]}: {request.node.callspec.params['kind']}"
    )
    request.node.user_properties.append((_PROPERTY, [kind, dict(counts)]))


class _Count:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._kinds: dict[str, dict[str, int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == _PROPERTY:
                    assert isinstance(value, list)
                    kind, counts = value
                    self._kinds[kind] = {each: counts.get(each, 0) for each in Outcome}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total: dict[str, int] = {
            each: sum(kind[each] for kind in self._kinds.values()) for each in Outcome
        }
        report = {"cases": sum(total.values()), "total": total, "kinds": self._kinds}
        self._path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        write = terminalreporter.write_line
        width = max(map(len, self._kinds), default=0)
        write(f"{'kind':{width}}  {'  '.join(Outcome)}")
        for kind, counts in {**self._kinds, f"{len(self._kinds)} kinds": total}.items():
            write(
                f"{kind:{width}}  " + "  ".join(f"{counts[each]:{len(each)}}" for each in Outcome)
            )
