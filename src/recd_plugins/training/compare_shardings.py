"""One model under several shardings of the same tables: their figures side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from recd_plugins.training.compare import figures, loss_max_abs_diff, ratio, shown, words
from recd_plugins.training.trainer import Result


@dataclass(frozen=True)
class ShardingComparison:
    """Runs over the same batches from the same weights, the first one the yardstick.

    Attributes:
        results: by sharding plugin.
    """

    results: Mapping[str, Result]

    @property
    def first(self) -> str:
        """What the others are compared with."""
        return next(iter(self.results))

    def loss_max_abs_diff(self, sharding: str) -> float:
        """The largest difference of two losses of one step from the first sharding's."""
        return loss_max_abs_diff(self.results[sharding], self.results[self.first])

    def ratios(self, sharding: str) -> dict[str, float | None]:
        """Each figure over that of the first; None where one of the two is missing or zero."""
        before, after = figures(self.results[self.first]), figures(self.results[sharding])
        return {
            name: ratio(value, before.get(name, (None, ""))[0])
            for name, (value, _) in after.items()
        }

    def as_json(self) -> dict[str, Any]:
        """What ``recd run --sharding A --sharding B --json`` writes; ratios are to the first."""
        return {
            "shardings": {name: result.as_json() for name, result in self.results.items()},
            "ratios": {name: self.ratios(name) for name in self.results},
            "loss_max_abs_diff": {name: self.loss_max_abs_diff(name) for name in self.results},
        }

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
        found = {name: figures(result) for name, result in self.results.items()}
        ratios = {name: self.ratios(name) for name in self.results}
        units = {figure: unit for each in found.values() for figure, (_, unit) in each.items()}
        for figure, unit in units.items():
            cells = []
            for name in self.results:
                value = shown(found[name].get(figure, (None, ""))[0], unit)
                over = ratios[name].get(figure)
                times = "" if over is None else f"{over:.3g}x"
                cells.append(value if times in ("", "1x") else f"{value}\n{times}")
            table.add_row(words(figure), *cells)
        table.add_row(
            "losses differ by at most",
            *(
                "" if name == self.first else f"{self.loss_max_abs_diff(name):.1e}"
                for name in self.results
            ),
        )
        table.caption = f"x: over {self.first}, where that is not 1"
        return table
