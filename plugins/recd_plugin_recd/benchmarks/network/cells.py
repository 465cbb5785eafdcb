"""The cells that were measured, in a file that grows, and how one is measured."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recd_plugin_recd.benchmarks.network.grid import Cell, Side
from recd_plugin_recd.benchmarks.network.ranks import Job, Measured
from recd_plugin_recd.benchmarks.network.workloads import write_registries
from recd_plugins.api import DataError, SetupError
from recd_plugins.testing.benchmark import Size
from recd_plugins.testing.shaped_network import ShapedNetwork

#: Sides that live in the ranks at once, besides the stock ones.
_AT_ONCE = 15
_RANKS = "recd_plugin_recd.benchmarks.network.ranks"
_LINES_SHOWN = 15


@dataclass(frozen=True)
class Effort:
    """How much of each side is measured: see ``Job``."""

    num_batches: int
    turns: int
    steps: int


EFFORTS: Mapping[Size, Effort] = {
    "tiny": Effort(num_batches=2, turns=1, steps=1),
    "small": Effort(num_batches=6, turns=4, steps=3),
    "reference": Effort(num_batches=8, turns=9, steps=4),
}


class MeasuredCells:
    """What was measured, by cell and side.

    Args:
        path: of the file that it is read from, where it is there, and written to.

    Raises:
        DataError: the file is none of this kind.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, dict[str, Measured]] = {}
        if path is not None and path.exists():
            try:
                cells = json.loads(path.read_text(encoding="utf-8"))
                self._found = {cell: _sides(values) for cell, values in cells.items()}
            except (ValueError, TypeError, AttributeError) as error:
                raise DataError(
                    f"{path} has no cells of recd bench network ({error}); name another file"
                ) from error

    def of(self, cell: Cell) -> Mapping[str, Measured]:
        """By side."""
        return self._found.get(cell.name, {})

    def add(self, cell: Cell, found: Mapping[str, Measured]) -> None:
        """More of a cell, and write it; of what is measured again the first one counts."""
        known = self._found.setdefault(cell.name, {})
        known.update({name: each for name, each in found.items() if name not in known})
        if self._path is not None:
            values = {
                cell: {side: asdict(each) for side, each in sides.items()}
                for cell, sides in self._found.items()
            }
            self._path.write_text(json.dumps(values, indent=1), encoding="utf-8")


def measure_cells(
    cells: Sequence[Cell], sides: Sequence[Side], size: Size, path: Path | None
) -> MeasuredCells:
    """Measure what is not in the file yet, cell by cell.

    Raises:
        SetupError: there can be no networks here, or a node failed.
    """
    measured = MeasuredCells(path)
    with tempfile.TemporaryDirectory() as name:
        for cell in cells:
            folder = Path(name) / cell.workload
            folder.mkdir(exist_ok=True)
            left = [side for side in sides if side.name not in measured.of(cell)]
            # One with which others are compared is in each of their runs.
            stock = [side for side in sides if side.stock]
            others = [side for side in left if not side.stock]
            if not left:
                continue
            for first in range(0, max(1, len(others)), _AT_ONCE):
                together = [*stock, *others[first : first + _AT_ONCE]]
                found = _measure(cell, together, folder, size)
                measured.add(cell, found)
    return measured


def _measure(cell: Cell, sides: Sequence[Side], folder: Path, size: Size) -> Mapping[str, Measured]:
    effort = EFFORTS[size]
    rate = None if cell.rate == "unshaped" else cell.rate
    # First, as tables take a while.
    with ShapedNetwork(cell.num_nodes, rate) as network, tempfile.TemporaryDirectory() as name:
        logs = Path(name)
        files, refused = write_registries(cell, sides, folder, size)
        job = Job(
            files,
            frozenset(side.name for side in sides if side.stock),
            cell.ranks_per_node,
            effort.num_batches,
            effort.turns,
            effort.steps,
            counts_links=True,
        )
        job_path, found_path = logs / "job", logs / "found"
        job_path.write_bytes(pickle.dumps(job))
        codes = network.run(
            network.torchrun(
                [_RANKS, str(job_path), str(found_path)],
                ranks_per_node=cell.ranks_per_node,
                options=["-m"],
            ),
            logs,
            {"OMP_NUM_THREADS": "1"},
        )
        if any(codes):
            told = (logs / f"node{codes.index(max(codes))}.log").read_text(errors="replace")
            lines = "\n".join(told.splitlines()[-_LINES_SHOWN:])
            raise SetupError(f"{cell.name}: a node ended with exit code {max(codes)}:\n{lines}")
        found = _sides(json.loads(found_path.read_text(encoding="utf-8")))
    return {**found, **{name: Measured(failure=why) for name, why in refused.items()}}


def _sides(values: Mapping[str, Any]) -> dict[str, Measured]:
    return {side: Measured(**measured) for side, measured in values.items()}
