"""The cells that were measured, in a file that grows, and how one is measured."""

from __future__ import annotations

import json
import math
import pickle
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from recd_plugin_recd.benchmarks.network.grid import Cell, Side
from recd_plugin_recd.benchmarks.network.link_trace import LinkTrace
from recd_plugin_recd.benchmarks.network.ranks import PROGRESS, Job, Measured
from recd_plugin_recd.benchmarks.network.workloads import rows_of_a_step, write_registries
from recd_plugins import __version__
from recd_plugins.api import DataError, SetupError
from recd_plugins.api.files import write_json
from recd_plugins.testing.benchmark import Size
from recd_plugins.testing.shaped_network import ShapedNetwork, unavailable

#: Sides that live at once, besides the stock ones, times ranks: each takes some 200 MB of a rank.
_AT_ONCE = 40
_RANKS = "recd_plugin_recd.benchmarks.network.ranks"
_LINES_SHOWN = 15
# Plans look at so many rows: sides are trained on these, whose steps are predicted. Of few batches
# it is chance how many ids of a rank's rows lie on its own node.
_PLANNED_ROWS, _LEAST_BATCHES = 4096, 8
# What it prints when a rank ended; a traceback of its own follows.
_TORCHRUN_SAYS = "failed (exitcode"
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Effort:
    """How much of each side is measured: see ``Job``.

    ``num_batches``: at most.
    """

    num_batches: int
    turns: int
    steps: int
    seconds: float = 0.0


EFFORTS: Mapping[Size, Effort] = {
    "tiny": Effort(num_batches=2, turns=1, steps=1),
    "small": Effort(num_batches=16, turns=3, steps=4, seconds=90.0),
    "reference": Effort(num_batches=16, turns=9, steps=4),
}


class MeasuredCells:
    """What was measured, by cell and side.

    Args:
        path: of the file that it is read from, where it is there, and written to.
        size: that cells are measured in; None where they are only read, of whatever size.

    Raises:
        DataError: the file is none of this kind, or of another size or version.
    """

    def __init__(self, path: Path | None, size: Size | None = None) -> None:
        self._path = path
        self._size = size
        self._found = _read(path, size)

    def names(self) -> list[str]:
        """Of all cells."""
        return list(self._found)

    def of(self, cell: Cell) -> Mapping[str, Measured]:
        """By side."""
        return self._found.get(cell.name, {})

    def has(self, cell: Cell, side: Side) -> bool:
        """Whether a side was measured; one that could not be trained may be tried again."""
        found = self.of(cell).get(side.name)
        return found is not None and found.failure is None

    def add(self, cell: Cell, found: Mapping[str, Measured]) -> None:
        """More of a cell, and write it; of what was measured before that counts.

        Also what another process has written meanwhile.
        """
        self._found = {
            cell: {**sides, **self._found.get(cell, {})}
            for cell, sides in {**self._found, **_read(self._path, self._size)}.items()
        }
        known = self._found.setdefault(cell.name, {})
        for name, each in found.items():
            if name not in known or known[name].failure is not None:
                known[name] = each
        if self._path is not None:
            values = {
                cell: {side: asdict(replace(each, traces=[])) for side, each in sides.items()}
                for cell, sides in self._found.items()
            }
            made = {"size": self._size, "version": __version__}
            write_json(self._path, {**made, "cells": values})


def measure_cells(
    cells: Sequence[Cell],
    sides: Sequence[Side],
    size: Size,
    path: Path | None,
    *,
    traces: bool = False,
) -> MeasuredCells:
    """Measure what is not in the file yet, cell by cell; ``traces`` are not kept in it.

    Raises:
        SetupError: there can be no networks here, or a node failed.
    """
    if (why := unavailable()) is not None:
        raise SetupError(f"recd bench network: {why}")
    measured = MeasuredCells(path, size)
    stock_sides = [side for side in sides if side.group == "stock"]
    with tempfile.TemporaryDirectory() as folder:
        for cell in cells:
            left = [side for side in sides if not measured.has(cell, side)]
            if not left:
                continue
            stock = [side.name for side in stock_sides]  # of each cell another may be best
            files, refused = write_registries(cell, sides, Path(folder), size)
            measured.add(cell, {name: Measured(failure=text) for name, text in refused.items()})
            names = [side.name for side in left if side.name in files and side.name not in stock]
            # Other sides are compared with those of the same run.
            only_stock = not names and not all(measured.has(cell, side) for side in stock_sides)
            at_once = _AT_ONCE // (cell.num_nodes * cell.ranks_per_node)
            for first in range(0, 1 if only_stock else len(names), at_once):
                together = [*stock, *names[first : first + at_once]]
                chosen = {name: files[name] for name in together}
                found = _measure(cell, chosen, stock_sides, size, traces=traces)
                trained = [found[name].seconds for name in stock if found[name].seconds]
                best = min(trained, key=statistics.median, default=[])
                for each in found.values():
                    each.stock_seconds = best if each.seconds else []
                measured.add(cell, found)
                stock = [name for name in stock if found[name].seconds == best] or stock
    return measured


def _measure(
    cell: Cell, files: Mapping[str, Path], stock: Sequence[Side], size: Size, *, traces: bool
) -> dict[str, Measured]:
    effort = EFFORTS[size]
    planned = _PLANNED_ROWS // rows_of_a_step(cell, size)
    rate = None if cell.rate == "unshaped" else cell.rate
    with ShapedNetwork(cell.num_nodes, rate) as network, tempfile.TemporaryDirectory() as name:
        logs = Path(name)
        job = Job(
            files,
            frozenset(side.name for side in stock if side.stock),
            frozenset(side.name for side in stock if not side.stock),
            cell.ranks_per_node,
            min(effort.num_batches, max(_LEAST_BATCHES, planned)),
            effort.turns,
            effort.steps,
            counts_links=True,
            seconds=effort.seconds,
            traces=traces,
        )
        job_path, found_path = logs / "job", logs / "found"
        job_path.write_bytes(pickle.dumps(job))
        programs = network.start(
            network.torchrun(
                [_RANKS, str(job_path), str(found_path)],
                ranks_per_node=cell.ranks_per_node,
                options=["-m"],
            ),
            logs,
            {"OMP_NUM_THREADS": "1"},
        )
        _follow(cell, programs, logs)
        return _sides(json.loads(found_path.read_text(encoding="utf-8")))


def _follow(cell: Cell, programs: Sequence[subprocess.Popen[bytes]], logs: Path) -> None:
    """Wait for all nodes, and say how far they are.

    Raises:
        SetupError: a node failed; others may still run.
    """
    told = 0
    running = True
    while running:
        running = any(program.poll() is None for program in programs)
        lines = (logs / "node0.log").read_text(errors="replace").splitlines()
        for line in (line for line in lines[told:] if line.startswith(PROGRESS)):
            click.echo(f"{cell.name}: {line.removeprefix(PROGRESS)}", err=True)
        told = len(lines)
        for node, program in enumerate(programs):
            if program.poll():
                log = (logs / f"node{node}.log").read_text(errors="replace")
                of_ranks = log.partition(_TORCHRUN_SAYS)[0] or log
                end = "\n".join(of_ranks.splitlines()[-_LINES_SHOWN:])
                raise SetupError(f"{cell.name}: node {node} ended with {program.poll()}:\n{end}")
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _read(path: Path | None, size: Size | None) -> dict[str, dict[str, Measured]]:
    """Nothing where there is no file; of another size or version, an error.

    A file of before these were kept can be read, and not added to.
    """
    if path is None or not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if size is None and "cells" not in kept:
            kept = {"size": None, "version": None, "cells": kept}
        of, version = kept["size"], kept["version"]
        found = {cell: _sides(values) for cell, values in kept["cells"].items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise DataError(
            f"{path} has no cells of recd bench network that say of which size and version they "
            f"are ({error!r}); name another file"
        ) from error
    if size is not None and (of, version) != (size, __version__):
        raise DataError(
            f"{path} has cells of --size {of} by recd-plugins {version}, and these would be of "
            f"--size {size} by {__version__}; name another file with --cells"
        )
    return found


def _sides(values: Mapping[str, Any]) -> dict[str, Measured]:
    sides = {side: Measured(**measured) for side, measured in values.items()}
    for side in sides.values():
        side.losses = [math.nan if loss is None else loss for loss in side.losses]  # of JSON
        side.traces = [LinkTrace(**trace) for trace in side.traces]  # type: ignore[arg-type]
    return sides
