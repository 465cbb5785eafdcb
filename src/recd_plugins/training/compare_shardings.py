"""One model under several shardings of the same tables: their figures side by side."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from recd_plugins.training.compare import Sides, as_json, shown_spread
from recd_plugins.training.figures import figure_words


class ShardingComparison(Sides):
    """Sides that are sharding plugins."""

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
                    figure: as_json(spread, ratios[name][figure])
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
        for figure, unit in self.units.items():
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
