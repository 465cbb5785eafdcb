"""The figures of a run with plugins next to those of the plain path."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from rich.table import Table

from recd_plugins.training.figures import figure_text, figure_words, figures_of
from recd_plugins.training.spread import Spread
from recd_plugins.training.trainer import Result

# What sums in another order make of a loss in a step; a ReLU or a large step may amplify it later.
_ROUNDING = 1e-6

S = TypeVar("S", bound=str)
T = TypeVar("T")


@dataclass(frozen=True)
class ComparedFigure:
    """One row of the table: a value of each side and, where both are there, their ratio.

    Attributes:
        name, unit: of the figure.
        baselines, values: of the baseline and of the plugins, over all rounds.
        ratios: of the two, of each round.
    """

    name: str
    unit: str
    baselines: Spread | None
    values: Spread | None
    ratios: Spread | None

    @property
    def ratio(self) -> float | None:
        """Plugins over baseline, the median of the rounds."""
        return None if self.ratios is None else self.ratios.median


@dataclass(frozen=True)
class Comparison:
    """Two runs over the same batches from the same weights, or some rounds of them.

    Attributes:
        baseline, plugins: the runs of the first round.
        again: those of the others.
    """

    baseline: Result
    plugins: Result
    again: Sequence[tuple[Result, Result]] = ()

    @property
    def rounds(self) -> list[tuple[Result, Result]]:
        """Both runs of each round."""
        return [(self.baseline, self.plugins), *self.again]

    @property
    def loss_max_abs_diff(self) -> float:
        """The largest difference of the two losses of one step; NaN where a loss is NaN."""
        return max((loss_max_abs_diff(b, a) for a, b in self.rounds), key=_nan_last)

    @property
    def steps_alike(self) -> int:
        """The steps from the first on whose losses are apart by rounding alone, in all rounds."""
        return min(
            int(np.argmin([*(np.abs(np.subtract(a.losses, b.losses)) <= _ROUNDING), False]))
            for a, b in self.rounds
        )

    def figures(self) -> list[ComparedFigure]:
        """Everything that both sides measured."""
        found = [(figures(before), figures(after)) for before, after in self.rounds]
        units = {name: unit for side in found[0] for name, (_, unit) in side.items()}
        compared = []
        for name, unit in units.items():
            sides = [[side.get(name, (None, ""))[0] for side in of] for of in found]
            before, after = ([of[i] for of in sides] for i in range(2))
            compared.append(
                ComparedFigure(
                    name,
                    unit,
                    Spread.of(before),
                    Spread.of(after),
                    Spread.of_ratios(after, before),
                )
            )
        return compared

    def as_json(self) -> dict[str, Any]:
        """What ``recd run --compare --json`` writes; ratios are plugins over baseline."""
        compared = self.figures()
        report = {
            "baseline": self.baseline.as_json(),
            "plugins": self.plugins.as_json(),
            "ratios": {each.name: each.ratio for each in compared},
            "loss_max_abs_diff": self.loss_max_abs_diff,
        }
        if self.again:
            sides: dict[str, dict[str, tuple[Spread | None, Spread | None]]] = {
                "baseline": {each.name: (each.baselines, None) for each in compared},
                "plugins": {each.name: (each.values, each.ratios) for each in compared},
            }
            report["rounds"] = {
                side: {
                    name: {"value": value and value.as_json(), "ratio": over and over.as_json()}
                    for name, (value, over) in found.items()
                }
                for side, found in sides.items()
            }
        return report

    def table(self) -> Table:
        """The figures side by side."""
        table = Table(title="with the registry's plugins, and without: the same batches")
        table.add_column("", overflow="fold")
        for heading in ("baseline", "plugins", "plugins / baseline"):
            table.add_column(heading, justify="right", overflow="fold")
        for figure in self.figures():
            table.add_row(
                figure_words(figure.name),
                shown_spread(figure.baselines, figure.unit),
                shown_spread(figure.values, figure.unit),
                "" if figure.ratios is None else figure.ratios.times(),
            )
        table.caption = (
            f"losses of {len(self.plugins.losses)} steps agree within {self.loss_max_abs_diff:.1e}"
        )
        if 0 < self.steps_alike < len(self.plugins.losses):
            table.caption += f", of the first {self.steps_alike} within {_ROUNDING:.0e}"
        if self.again:
            table.caption += (
                f"; medians of {len(self.rounds)} rounds, and of ratios, the least to the most"
            )
        return table


def in_rounds(sides: Sequence[S], rounds: int, train: Callable[[S], T]) -> list[dict[S, T]]:
    """What each side gives in each round. Every other round begins with the last of them.

    So a machine that grows slower, or faster, does it to all of them alike.
    """
    found = []
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
