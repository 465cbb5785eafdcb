"""Patterns of the schedule: a test that got another name, or place, would run at other times."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from tests.schedule import BENCHMARKS, BY_NIGHT, IN_TURN, RAY, SLOW

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


@pytest.mark.parametrize("pattern", sorted({*SLOW, *BY_NIGHT, *IN_TURN, *RAY, *BENCHMARKS}))
def test_it_is_of_a_test(pattern: str) -> None:
    files, _, start = pattern.partition("::")
    start, is_cell, _ = start.partition("[")
    assert any(
        test == start if is_cell else test.startswith(start)
        for file, tests in tests_of_files().items()
        if file.match(files)
        for test in tests
    )
