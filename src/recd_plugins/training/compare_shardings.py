"""One model under several shardings of the same tables: their figures side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from recd_plugins.training.compare import figures, loss_max_abs_diff, shown_spread
from recd_plugins.training.figures import figure_words
from recd_plugins.training.spread import Spread
from recd_plugins.training.trainer import Result


@dataclass(frozen=True)
class ShardingComparison:
    """Runs over the same batches from the same weights, the first one the yardstick.

    Attributes:
        results: by sharding plugin, of the first round.
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
        """What the others are compared with."""
        return next(iter(self.results))

    def loss_max_abs_diff(self, sharding: str) -> float:
        """The largest difference of two losses of one step from the first sharding's."""
        return loss_max_abs_diff(self.results[sharding], self.results[self.first])

    def spreads(self, sharding: str) -> dict[str, Spread | None]:
        """Each figure over all rounds; None where a round has none."""
        found = [figures(results[sharding]) for results in self.rounds]
        return {
            name: Spread.of(each.get(name, (None, ""))[0] for each in found) for name in found[0]
        }

    def ratios(self, sharding: str) -> dict[str, Spread | None]:
        """Each figure over that of the first; None where one of the two is missing or zero."""
        pairs = [(figures(each[self.first]), figures(each[sharding])) for each in self.rounds]
        return {
            name: Spread.of_ratios(
                [after.get(name, (None, ""))[0] for _, after in pairs],
                [before.get(name, (None, ""))[0] for before, _ in pairs],
            )
            for name in pairs[0][1]
        }

    def as_json(self) -> dict[str, Any]:
        """What ``recd run --sharding A --sharding B --json`` writes; ratios are to the first."""
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
                    figure: {
                        "value": spread and spread.as_json(),
                        "ratio": (over := ratios[name][figure]) and over.as_json(),
                    }
                    for figure, spread in self.spreads(name).items()
                }
                for name in self.results
            }
        return report

    def table(self) -> Table:
        """A column for each sharding, with the ratio to the first one's; five are 80 wide."""
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
        units = {
            figure: unit
            for result in self.results.values()
            for figure, (_, unit) in figures(result).items()
        }
        for figure, unit in units.items():
            cells = []
            for name in self.results:
                value = shown_spread(found[name].get(figure), unit)
                over = ratios[name].get(figure)
                times = "" if over is None else over.times()
                cells.append(value if times in ("", "1x") else f"{value}\n{times}")
            table.add_row(figure_words(figure), *cells)
        table.add_row(
            "losses differ by at most",
            *(
                "" if name == self.first else f"{self.loss_max_abs_diff(name):.1e}"
                for name in self.results
            ),
        )
        table.caption = f"x: over {self.first}, where that is not 1"
        if self.again:
            table.caption += f"; medians of {len(self.rounds)} rounds, the least to the most"
        return table
