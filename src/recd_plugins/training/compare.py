"""Runs side by side: with plugins and without, or under several shardings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
from rich import box
from rich.table import Table

from recd_plugins.training.result import Result, figure_text, figure_words, figures_of

# Rounding grows to this much in a short run that is not ill-conditioned.
_GROWN = 1e-3

S = TypeVar("S", bound=str)
T = TypeVar("T")


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
        """Return the spread over all rounds; None if one has no value."""
        known = list(values)
        numbers = [value for value in known if value is not None]
        if not numbers or len(numbers) < len(known):
            return None
        return cls(statistics.median(numbers), min(numbers), max(numbers))

    def as_json(self) -> dict[str, float]:
        """Return JSON values."""
        return asdict(self)

    def times(self) -> str:
        """Return a ratio as tables show it, and whether it shows no difference."""
        shown = f"{self.median:.3g}x"
        if self.least == self.most:
            return shown
        within = "\nno difference shown" if self.least < 1 < self.most else ""
        return f"{shown}\n{self.least:.3g}x to {self.most:.3g}x{within}"


@dataclass(frozen=True)
class Variants:
    """Runs over the same batches from the same weights; the first variant is the yardstick."""

    results: Mapping[str, Result]
    again: Sequence[Mapping[str, Result]] = ()

    @property
    def rounds(self) -> list[Mapping[str, Result]]:
        """The runs of each round."""
        return [self.results, *self.again]

    @property
    def first(self) -> str:
        """The variant that others are compared with."""
        return next(iter(self.results))

    @property
    def units(self) -> dict[str, str]:
        """Units of all figures by name, in the order that each variant has."""
        found = [figures(result) for result in self.results.values()]
        units = {name: unit for of in found for name, (_, unit) in of.items()}
        return {name: units[name] for name in _merged(found)}

    def loss_max_abs_diff(self, variant: str) -> float:
        """Return the largest difference of two losses of one step from the first variant's."""
        differences = (loss_max_abs_diff(each[self.first], each[variant]) for each in self.rounds)
        return max(differences, key=lambda value: (math.isnan(value), value))

    def spreads(self, variant: str) -> dict[str, Spread | None]:
        """Return each figure of a variant over all rounds."""
        found = [figures(each[variant]) for each in self.rounds]
        return {name: Spread.of(_values(found, name)) for name in found[0]}

    def ratios(self, variant: str) -> dict[str, Spread | None]:
        """Return each figure over that of the first; None if one is missing or the base zero."""
        found = [figures(each[variant]) for each in self.rounds]
        bases = [figures(each[self.first]) for each in self.rounds]
        return {
            name: Spread.of(
                value / base if value is not None and base else None
                for value, base in zip(_values(found, name), _values(bases, name), strict=True)
            )
            for name in found[0]
        }


@dataclass(frozen=True)
class Comparison(Variants):
    """The variants ``baseline`` and ``plugins``."""

    wire: str = "fp32"

    def as_json(self) -> dict[str, Any]:
        """Return what ``recd run --compare --json`` writes; ratios are plugins over baseline."""
        ratios, names = self.ratios("plugins"), self.units
        report = {
            **{name: result.as_json() for name, result in self.results.items()},
            "ratios": {name: (over := ratios.get(name)) and over.median for name in names},
            "loss_max_abs_diff": self.loss_max_abs_diff("plugins"),
        }
        if self.again:
            report["rounds"] = {
                variant: {name: _in_json(found.get(name), over.get(name)) for name in names}
                for variant, found, over in (
                    ("baseline", self.spreads("baseline"), {}),
                    ("plugins", self.spreads("plugins"), ratios),
                )
            }
        return report

    def table(self) -> Table:
        """Show the figures side by side."""
        table = Table(title="with the registry's plugins, and without: the same batches")
        table.add_column("", overflow="fold")
        for heading in ("baseline", "plugins", "plugins / baseline"):
            table.add_column(heading, justify="right", overflow="fold")
        before, after, ratios = *map(self.spreads, self.results), self.ratios("plugins")
        for name, unit in self.units.items():
            over = ratios.get(name)
            table.add_row(
                figure_words(name),
                _shown(before.get(name), unit),
                _shown(after.get(name), unit),
                "" if over is None else over.times(),
            )
        table.caption = self._losses_in_words()
        if self.again:
            table.caption += (
                f"; medians of {len(self.rounds)} rounds, and of ratios, the least to the most"
            )
        return table

    def _losses_in_words(self) -> str:
        steps, apart = len(self.results["plugins"].losses), self.loss_max_abs_diff("plugins")
        words = f"losses of {steps} steps agree within {apart:.1e}"
        if self.wire != "fp32":
            return f"{words}: the plugins send by training.wire {self.wire}, the baseline by fp32"
        if not apart <= _GROWN:
            return f"{words}: training amplifies rounding, or something computes otherwise"
        return words


class ShardingComparison(Variants):
    """Variants that are sharding plugins for the same tables."""

    def as_json(self) -> dict[str, Any]:
        """Return what ``recd run --sharding A --sharding B --json`` writes."""
        ratios = {name: self.ratios(name) for name in self.results}
        report = {
            "shardings": {name: result.as_json() for name, result in self.results.items()},
            "ratios": {
                name: {figure: each and each.median for figure, each in of.items()}
                for name, of in ratios.items()
            },
            "loss_max_abs_diff": {name: self.loss_max_abs_diff(name) for name in self.results},
        }
        if self.again:
            report["rounds"] = {
                name: {
                    figure: _in_json(spread, ratios[name][figure])
                    for figure, spread in self.spreads(name).items()
                }
                for name in self.results
            }
        return report

    def table(self) -> Table:
        """Show a column for each sharding, with the ratio to the first; five are 80 wide."""
        table = Table(
            title="the same tables, batches and initial weights under each sharding",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        table.add_column("", min_width=len("  all_to_all"))
        for name in self.results:
            heading = name.replace(".", ".\n").replace("_", "_\n")
            table.add_column(heading, justify="right", overflow="fold")
        found = {name: self.spreads(name) for name in self.results}
        ratios = {name: self.ratios(name) for name in self.results}
        for figure, unit in self.units.items():
            cells = []
            for name in self.results:
                value = _shown(found[name].get(figure), unit)
                over = ratios[name].get(figure)
                times = "" if over is None else over.times()
                cells.append(value if times in ("", "1x") else f"{value}\n{times}")
            table.add_row(figure_words(figure), *cells)
        differ = [f"{self.loss_max_abs_diff(name):.1e}" for name in self.results]
        table.add_row("losses differ by at most", "", *differ[1:])
        table.caption = f"x: over {self.first}, where that is not 1"
        if self.again:
            table.caption += f"; medians of {len(self.rounds)} rounds, the least to the most"
        return table


def in_rounds(variants: Sequence[S], rounds: int, train: Callable[[S], T]) -> list[dict[str, T]]:
    """Train each variant in each round. Every other round begins with the last of them.

    A machine that grows slower, or faster, does it to all of them alike then.
    """
    found: list[dict[str, T]] = []
    for number in range(rounds):
        turn = list(variants) if number % 2 == 0 else list(reversed(variants))
        results = {variant: train(variant) for variant in turn}
        found.append({variant: results[variant] for variant in variants})
    return found


def loss_max_abs_diff(result: Result, other: Result) -> float:
    """Return the largest difference of the two losses of one step; NaN if a loss is NaN."""
    return float(np.abs(np.subtract(result.losses, other.losses)).max())


def figures(result: Result) -> dict[str, tuple[float | None, str]]:
    """Return value and unit of each figure by name."""
    return figures_of(result.as_json())


def _merged(variants: Sequence[Iterable[str]]) -> list[str]:
    """Merge names; one that a variant has alone stands behind what it has before it."""
    names: list[str] = []
    for of in variants:
        place = 0
        for name in of:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return names


def _in_json(value: Spread | None, ratio: Spread | None) -> dict[str, Any]:
    return {"value": value and value.as_json(), "ratio": ratio and ratio.as_json()}


def _shown(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return figure_text(None, unit)
    middle = figure_text(spread.median, unit)
    if spread.least == spread.most:
        return middle
    return f"{middle}\n{figure_text(spread.least, unit)} to {figure_text(spread.most, unit)}"


def _values(
    rounds: Sequence[Mapping[str, tuple[float | None, str]]], name: str
) -> list[float | None]:
    return [each.get(name, (None, ""))[0] for each in rounds]
