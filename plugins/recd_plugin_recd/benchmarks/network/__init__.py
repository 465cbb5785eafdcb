"""Training over networks of several rates, against stock TorchRec.

Nodes are network namespaces of this machine. All sides of a cell live in the same ranks, start from
the same weights, and step in turns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recd_plugins.api import RecdError
from recd_plugins.api.files import check_writable
from recd_plugins.testing.benchmark import Findings, Size

SUMMARY = "training on nodes that are joined by links of a rate, stock TorchRec against ours"
HELP = {
    "only": "Names with commas between them: rates (unshaped, 1gbit, 200mbit, 100mbit, 50mbit), "
    "nodes x ranks (2x1, 4x1, 2x2, 4x2), workloads (papercal, rm1, requests), groups of sides "
    "(stock, alone, joined, auto, every), sides.",
    "cells": "A file for what was measured of each cell; what is in it is not measured again.",
    "measured": "Report what is in the file of --cells, of these names only, and measure nothing.",
    "trace": "A picture, as SVG: one step of each side that is measured, on the link of a node.",
}


def workload(
    size: Size,
    *,
    only: str | None = None,
    cells: Path | None = None,
    measured: bool = False,
    trace: Path | None = None,  # noqa: ARG001
) -> str:
    """The input in words."""
    if measured:
        return f"what {cells} has"
    from recd_plugin_recd.benchmarks.network.cells import EFFORTS
    from recd_plugin_recd.benchmarks.network.grid import chosen
    from recd_plugin_recd.benchmarks.network.workloads import workload_text

    found, sides = chosen(size, only)
    effort = EFFORTS[size]
    inputs = dict.fromkeys(workload_text(cell.workload, size) for cell in found)
    return (
        f"{'; '.join(inputs)}; {len(found)} network(s), {len(sides)} sides; batches are made "
        f"beforehand and go round; {effort.turns} turn(s) of 1 step that warms up and "
        f"{effort.steps} timed"
    )


def run(
    size: Size,
    *,
    only: str | None = None,
    cells: Path | None = None,
    measured: bool = False,
    trace: Path | None = None,
) -> Findings:
    """One cell after the other."""
    # Imported here: `recd bench` reads this module for its summary.
    from recd_plugin_recd.benchmarks.network.cells import MeasuredCells, measure_cells
    from recd_plugin_recd.benchmarks.network.figures import CellFigures
    from recd_plugin_recd.benchmarks.network.grid import chosen, chosen_of
    from recd_plugin_recd.benchmarks.network.summary import summary_figures, summary_tables

    if measured:
        if cells is None or not cells.exists() or trace is not None:
            raise RecdError(
                "--measured: it takes a file that --cells wrote, and goes without --trace"
            )
        known = MeasuredCells(cells)
        chosen_cells, sides = chosen_of(known.names(), only)
    else:
        chosen_cells, sides = chosen(size, only)
        if trace is not None:
            check_writable(trace)
        known = measure_cells(chosen_cells, sides, size, cells, traces=trace is not None)
    found = [CellFigures(cell, sides, known.of(cell)) for cell in chosen_cells]
    traced = {name: each for cell in found for name, each in cell.traces().items()}
    if trace is not None and traced:
        from recd_plugin_recd.benchmarks.network.trace_plot import draw_traces

        draw_traces(trace, traced)
    by_cell = [
        table for each in found for table in (each.table(), each.lost()) if table is not None
    ]
    return Findings(
        figures=[*summary_figures(found), *(figure for each in found for figure in each.figures())],
        details=[*by_cell, *summary_tables(found)],
        notes=[note for each in found for note in each.notes()],
    )


def plot(result: dict[str, Any], folder: Path) -> list[Path]:
    """Step times by rate, the grid, and predictions beside steps, from a report."""
    from recd_plugin_recd.benchmarks.network.plots import draw

    return draw(result, folder)
