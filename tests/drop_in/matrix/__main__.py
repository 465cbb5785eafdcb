"""The matrix of drop-in: what becomes of every cell, counts by sign, and the page.

With ``--keep`` outcomes stay in a file, and the cells that are in it are not run again: a run that
was stopped, or that ``--minutes`` ended, goes on there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path

from tests.drop_in.matrix.outcome import SIGNS, Outcome, outcome_of
from tests.drop_in.matrix.page import trained_modules, write
from tests.drop_in.matrix.products import AXES, axis_cells, base_cells, pair_cells, sample
from tests.drop_in.matrix.run import train_cells
from tests.drop_in.matrix.trainer import Cell

from recd_plugins.runtime.errors import RankError, RecdError
from recd_plugins.testing.gloo import end_ranks, run_on_ranks

_AT_A_TIME = 6  # cells whose wait for ranks that fail fits into the time of a call


class OutOfTimeError(Exception):
    """The minutes of a run are over."""


class Run:
    """Outcomes of cells, kept in a file where one is given.

    Args:
        kept: lines of JSON, one a cell; read at the start.
        minutes: after which no cell is begun.
    """

    def __init__(self, kept: Path | None = None, minutes: float | None = None) -> None:
        self._kept = kept
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self.outcomes: dict[Cell, Outcome] = {}
        if kept is not None and kept.exists():
            for line in kept.read_text(encoding="utf-8").splitlines():
                cell, *outcome = json.loads(line)
                self.outcomes[Cell(*cell)] = Outcome(*outcome)

    def run(self, cells: Iterable[Cell]) -> dict[Cell, Outcome]:
        """The outcomes of cells, of those that are new by training them.

        Raises:
            OutOfTimeError: before all have one.
        """
        cells = list(cells)
        left = [cell for cell in cells if cell not in self.outcomes]
        for start in range(0, len(left), _AT_A_TIME):
            if self._end is not None and time.monotonic() > self._end:
                raise OutOfTimeError(f"{len(left) - start} of {len(cells)} cells are left")
            found = outcomes_of(left[start : start + _AT_A_TIME])
            self.outcomes |= found
            for cell, outcome in found.items():
                print(outcome.sign, cell, outcome.said[:300].replace("\n", " "), flush=True)
            if self._kept is not None:
                with self._kept.open("a", encoding="utf-8") as file:
                    for cell, outcome in found.items():
                        line = [astuple(cell), outcome.sign, outcome.said]
                        file.write(json.dumps(line) + "\n")
        return {cell: self.outcomes[cell] for cell in cells}


def outcomes_of(cells: list[Cell]) -> dict[Cell, Outcome]:
    """What becomes of cells; those that end a rank are faults."""
    found: dict[Cell, Outcome] = {}
    for start in range(0, len(cells), _AT_A_TIME):
        part = cells[start : start + _AT_A_TIME]
        try:
            seen = run_on_ranks(train_cells, 2, part)
            found |= {c: outcome_of(c, of) for c, *of in zip(part, *seen, strict=True)}
        except (RecdError, RankError) as error:
            if len(part) == 1:
                found[part[0]] = Outcome("!", str(error))
            else:
                for cell in part:
                    found |= outcomes_of([cell])
    return found


def all_outcomes(run: Run, *, sampled: bool = False) -> dict[Cell, Outcome]:
    """Of every cell, or of those of the sample."""
    outcomes = run.run(base_cells())
    trained = trained_modules(outcomes)
    cells = [cell for axis in AXES for cell in axis_cells(axis, trained)] + pair_cells()
    return outcomes | run.run(sample(cells) if sampled else cells)


def main() -> int:
    """0 where there is no fault; 1 where there is one; 2 where the minutes were over before."""
    parser = argparse.ArgumentParser(prog="python -m tests.drop_in.matrix", description=__doc__)
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the page there")
    parser.add_argument("--keep", metavar="FILE", type=Path, help="outcomes; goes on with those")
    parser.add_argument("--minutes", type=float, help="begin no cell after as many")
    parser.add_argument(
        "--sample", action="store_true", help="every module, and each value of the axes once"
    )
    given = parser.parse_args()
    run = Run(given.keep, given.minutes)
    try:
        outcomes = all_outcomes(run, sampled=given.sample)
    except OutOfTimeError as error:
        print(f"{error}: the same command goes on")
        return 2
    finally:
        end_ranks()
    if given.write is not None:
        given.write.write_text(write(outcomes), encoding="utf-8")
    signs = [outcome.sign for outcome in outcomes.values()]
    for sign, words in SIGNS.items():
        print(f"{signs.count(sign):5} {sign}  {words}")
    print(", ".join(f"{words} {sum(map(signs.count, of))}" for words, of in COUNTED.items()))
    return 1 if "!" in signs else 0


#: Signs by what a reader asks for.
COUNTED = {
    "equal": "=~+pw",
    "refused": "rR",
    "CUDA only": "c",
    "TorchRec fails": "t",
    "faults": "!",
}

if __name__ == "__main__":
    sys.exit(main())
