"""Kinds of bad inputs, and the test that draws cases of them."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.fuzz.oracle import Fault, Outcome

T = TypeVar("T")

#: More cases, of draws that differ from night to night.
_ALONE = os.environ.get("RECD_FUZZ") == "nightly"
NIGHTLY = _ALONE or settings.get_current_profile_name() == "nightly"
#: Draws of a kind; hypothesis' profile ``nightly`` multiplies those of every property test.
CASES = int(os.environ.get("RECD_FUZZ_CASES", "6" if _ALONE else "1"))


@dataclass(frozen=True)
class Case:
    """One bad input in the making. The current folder is its own, and empty at the start."""

    data: st.DataObject

    def one_of(self, choices: Any, label: str | None = None) -> Any:
        """One of a sequence."""
        return self.data.draw(st.sampled_from(choices), label)

    def number(self, least: int, most: int, label: str | None = None) -> int:
        """A whole number, both ends included."""
        return self.data.draw(st.integers(least, most), label)

    def place(self, data: Sized, label: str | None = None) -> int:
        """A place in what may be longer in the next run, as with times in it; draws stay equal."""
        return self.number(0, (1 << 20) - 1, label) % len(data)

    def draw(self, strategy: st.SearchStrategy[T], label: str | None = None) -> T:
        """Anything else."""
        return self.data.draw(strategy, label)


Kind = Callable[[Case], Outcome]


class Kinds:
    """The kinds of one subject: functions that make a case, try it and say what became of it."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.kinds: dict[str, Kind] = {}

    def add(self, kind: Kind) -> Kind:
        """A decorator; the function's name is the kind's."""
        assert kind.__name__ not in self.kinds, f"two kinds named {kind.__name__}"
        self.kinds[kind.__name__] = kind
        return kind

    def test(self) -> Callable[..., None]:
        """The test of all kinds: the first draws of each are the same everywhere.

        What failed is kept in hypothesis' database and tried first from then on.
        """

        @pytest.mark.parametrize("kind", self.kinds)
        @settings(
            max_examples=CASES,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        @given(data=st.data())
        def test(kind: str, data: st.DataObject, tally: Counter[str]) -> None:
            with _own_folder():
                try:
                    outcome = self.kinds[kind](Case(data))
                except Fault as fault:
                    tally[fault.outcome] += 1
                    raise
                tally[outcome] += 1

        return test if NIGHTLY else seed(0)(test)


@contextmanager
def _own_folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="recd-fuzz-") as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
