"""The figures of a run with plugins next to those of the plain path."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from rich.table import Table

from recd_plugins.training.figures import figure_text, figure_words, figures_of
from recd_plugins.training.result import Result
from recd_plugins.training.spread import Spread
from recd_plugins.training.stall_report import FEW_STEPS

# What sums in another order make of a loss in a step; a ReLU or a large step may amplify it later.
_ROUNDING = 1e-6
# What rounding grows to in a short run that is not ill-conditioned.
_GROWN = 1e-3

S = TypeVar("S", bound=str)
T = TypeVar("T")


@dataclass(frozen=True)
class Sides:
    """Runs over the same batches from the same weights, the first side the yardstick.

    Attributes:
        results: by side, of the first round.
        again: those of others.
    """

    results: Mapping[str, Result]
    again: Sequence[Mapping[str, Result]] = ()

    @property
    def rounds(self) -> list[Mapping[str, Result]]:
        """The runs of each round."""
        return [self.results, *self.again]

    @property
    def first(self) -> str:
        """The side that others are compared with."""
        return next(iter(self.results))

    @property
    def units(self) -> dict[str, str]:
        """Units of the figures that any side has, by name, in the order that each side has."""
        found = [figures(result) for result in self.results.values()]
        units = {name: unit for side in found for name, (_, unit) in side.items()}
        return {name: units[name] for name in _merged(found)}

    def loss_max_abs_diff(self, side: str) -> float:
        """The largest difference of two losses of one step from the first side's; NaN is one."""
        differences = (loss_max_abs_diff(each[self.first], each[side]) for each in self.rounds)
        return max(differences, key=_nan_last)

    def steps_alike(self, side: str) -> int:
        """Steps from the first on whose losses are apart by rounding alone, in all rounds."""
        return min(
            int(np.argmin([*(np.abs(np.subtract(a, b)) <= _ROUNDING), False]))
            for a, b in ((each[self.first].losses, each[side].losses) for each in self.rounds)
        )

    def spreads(self, side: str) -> dict[str, Spread | None]:
        """Each figure of a side over all rounds; None where a round has none."""
        found = [figures(each[side]) for each in self.rounds]
        return {name: Spread.of(_values(found, name)) for name in found[0]}

    def ratios(self, side: str) -> dict[str, Spread | None]:
        """Each figure over that of the first; None where one of the two is missing or zero."""
        found = [figures(each[side]) for each in self.rounds]
        bases = [figures(each[self.first]) for each in self.rounds]
        return {
            name: Spread.of_ratios(_values(found, name), _values(bases, name)) for name in found[0]
        }


@dataclass(frozen=True)
class Comparison(Sides):
    """The sides ``baseline`` and ``plugins``.

    Attributes:
        wire: format of what the plugins' side sends, which may round it; the baseline sends fp32.
    """

    wire: str = "fp32"

    def as_json(self) -> dict[str, Any]:
        """What ``recd run --compare --json`` writes; ratios are plugins over baseline."""
        ratios, names = self.ratios("plugins"), self.units
        report = {
            **{side: result.as_json() for side, result in self.results.items()},
            "ratios": {name: (over := ratios.get(name)) and over.median for name in names},
            "loss_max_abs_diff": self.loss_max_abs_diff("plugins"),
        }
        if self.again:
            report["rounds"] = {
                side: {name: as_json(found.get(name), over.get(name)) for name in names}
                for side, found, over in (
                    ("baseline", self.spreads("baseline"), {}),
                    ("plugins", self.spreads("plugins"), ratios),
                )
            }
        return report

    def table(self) -> Table:
        """The figures side by side."""
        table = Table(title="with the registry's plugins, and without: the same batches")
        table.add_column("", overflow="fold")
        for heading in ("baseline", "plugins", "plugins / baseline"):
            table.add_column(heading, justify="right", overflow="fold")
        before, after, ratios = *map(self.spreads, self.results), self.ratios("plugins")
        for name, unit in self.units.items():
            over = ratios.get(name)
            table.add_row(
                figure_words(name),
                shown_spread(before.get(name), unit),
                shown_spread(after.get(name), unit),
                "" if over is None else over.times(),
            )
        table.caption = self._losses_in_words()
        timed = [each.stalls.worst.steps for each in self.results.values() if each.stalls]
        if timed and min(timed) < FEW_STEPS:
            table.caption += f"; speed is of {min(timed)} timed: take more steps, or --rounds"
        if self.again:
            table.caption += (
                f"; medians of {len(self.rounds)} rounds, and of ratios, the least to the most"
            )
        return table

    def _losses_in_words(self) -> str:
        steps, alike = len(self.results["plugins"].losses), self.steps_alike("plugins")
        apart = self.loss_max_abs_diff("plugins")
        agree = f"losses of {steps} steps agree within {apart:.1e}"
        if alike == steps:
            return agree
        are = f"losses of {steps} steps are up to {apart:.1e} apart"
        if self.wire != "fp32":
            return (
                f"{are}: training.wire {self.wire} rounds what the plugins' side sends, and the "
                "baseline sends fp32"
            )
        if not alike:
            return (
                f"{are}, from the first on, which is more than rounding of float32: something "
                "computes otherwise"
            )
        if apart <= _GROWN:
            return f"{agree}, of the first {alike} within {_ROUNDING:.0e}"
        return (
            f"{are}, those of the first {alike} within {_ROUNDING:.0e}: training amplifies "
            "rounding, or something computes otherwise"
        )


def _merged(sides: Sequence[Iterable[str]]) -> list[str]:
    """Names of all sides; one that a side has alone stands behind what it has before it."""
    names: list[str] = []
    for side in sides:
        place = 0
        for name in side:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return names


def as_json(value: Spread | None, ratio: Spread | None) -> dict[str, Any]:
    """A figure of several rounds, and over the first side's."""
    return {"value": value and value.as_json(), "ratio": ratio and ratio.as_json()}


def in_rounds(sides: Sequence[S], rounds: int, train: Callable[[S], T]) -> list[dict[str, T]]:
    """What each side gives in each round. Every other round begins with the last of them.

    So a machine that grows slower, or faster, does it to all of them alike.
    """
    found: list[dict[str, T]] = []
    for number in range(rounds):
        turn = list(sides) if number % 2 == 0 else list(reversed(sides))
        results = {side: train(side) for side in turn}
        found.append({side: results[side] for side in sides})
    return found


def result_table(result: Result) -> Table:
    """The figures of one run."""
    table = Table(title=f"{len(result.losses)} steps")
    table.add_column("", overflow="fold")
    table.add_column("value", justify="right", overflow="fold")
    for name, (value, unit) in figures(result).items():
        table.add_row(figure_words(name), figure_text(value, unit))
    if result.first_step:
        table.caption = (
            f"resumed at step {result.first_step}: train figures and speed are of the "
            f"{len(result.losses) - result.first_step} steps since"
        )
    return table


def loss_max_abs_diff(result: Result, other: Result) -> float:
    """The largest difference of the two losses of one step; NaN where a loss is NaN."""
    return float(np.abs(np.subtract(result.losses, other.losses)).max())


def figures(result: Result) -> dict[str, tuple[float | None, str]]:
    """Value and unit by name."""
    return figures_of(result.as_json())


def shown_spread(spread: Spread | None, unit: str) -> str:
    """A figure of several rounds as tables show it."""
    if spread is None:
        return figure_text(None, unit)
    middle = figure_text(spread.median, unit)
    if spread.least == spread.most:
        return middle
    return f"{middle}\n{figure_text(spread.least, unit)} to {figure_text(spread.most, unit)}"


def _nan_last(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def _values(
    rounds: Sequence[Mapping[str, tuple[float | None, str]]], name: str
) -> list[float | None]:
    return [each.get(name, (None, ""))[0] for each in rounds]
