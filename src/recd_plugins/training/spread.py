"""One figure of several rounds: the median, and how far the rounds lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A figure over rounds.

    Attributes:
        median, least, most: of them.
    """

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of the values of all rounds; None where one has none."""
        known = list(values)
        numbers = [value for value in known if value is not None]
        if not numbers or len(numbers) < len(known):
            return None
        return cls(statistics.median(numbers), min(numbers), max(numbers))

    @classmethod
    def of_ratios(
        cls, values: Iterable[float | None], bases: Iterable[float | None]
    ) -> Spread | None:
        """Of each round's value over its base."""
        return cls.of(map(ratio, values, bases))

    def as_json(self) -> dict[str, float]:
        """JSON values."""
        return {"median": self.median, "least": self.least, "most": self.most}

    def times(self) -> str:
        """A ratio as tables show it, and that it shows nothing where rounds differ about it."""
        shown = f"{self.median:.3g}x"
        if self.least == self.most:
            return shown
        within = "\nno difference shown" if self.least < 1 < self.most else ""
        return f"{shown}\n{self.least:.3g}x to {self.most:.3g}x{within}"


def ratio(value: float | None, base: float | None) -> float | None:
    """``value`` over ``base``; None where one of the two is missing, or the base zero."""
    return value / base if value is not None and base else None
