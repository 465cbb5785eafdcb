"""The matrix of drop-in: what becomes of every cell, counts by sign, and the page.

With ``--keep`` outcomes stay in a file, and the cells that are in it are not run again: a run that
was stopped goes on there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path

from tests.drop_in.matrix.page import SIGNS, Outcome, outcome_of, trained_modules, write
from tests.drop_in.matrix.products import AXES, axis_cells, base_cells, pair_cells, sample
from tests.drop_in.matrix.run import train_cells
from tests.drop_in.matrix.trainer import Cell

from recd_plugins.runtime.errors import RankError, RecdError
from recd_plugins.testing.gloo import end_ranks, run_on_ranks

_AT_A_TIME = 6  # cells whose wait for ranks that fail fits into the time of a call
#: Signs by what a reader asks for.
_COUNTED = {
    "equal": "=~+pw",
    "refused": "rR",
    "CUDA only": "c",
    "TorchRec fails": "t",
    "faults": "!",
}


class Run:
    """Outcomes of cells, kept in a file of lines of JSON, one a cell, where one is given."""

    def __init__(self, kept: Path | None = None) -> None:
        self._kept = kept
        self.outcomes: dict[Cell, Outcome] = {}
        if kept is not None and kept.exists():
            for line in kept.read_text(encoding="utf-8").splitlines():
                cell, *outcome = json.loads(line)
                self.outcomes[Cell(*cell)] = Outcome(*outcome)

    def run(self, cells: Iterable[Cell]) -> dict[Cell, Outcome]:
        """The outcomes of cells, of those that are new by training them."""
        cells = list(cells)
        left = [cell for cell in cells if cell not in self.outcomes]
        for start in range(0, len(left), _AT_A_TIME):
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


def main() -> int:
    """0 where there is no fault; 1 where there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.drop_in.matrix", description=__doc__)
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the page there")
    parser.add_argument("--keep", metavar="FILE", type=Path, help="outcomes; goes on with those")
    parser.add_argument(
        "--sample", action="store_true", help="every module, and each value of the axes once"
    )
    given = parser.parse_args()
    run = Run(given.keep)
    try:
        outcomes = run.run(base_cells())
        trained = trained_modules(outcomes)
        cells = [cell for axis in AXES for cell in axis_cells(axis, trained)] + pair_cells()
        outcomes |= run.run(sample(cells) if given.sample else cells)
    finally:
        end_ranks()
    if given.write is not None:
        given.write.write_text(write(outcomes), encoding="utf-8")
    signs = [outcome.sign for outcome in outcomes.values()]
    for sign, words in SIGNS.items():
        print(f"{signs.count(sign):5} {sign}  {words}")
    print(", ".join(f"{words} {sum(map(signs.count, of))}" for words, of in _COUNTED.items()))
    return 1 if "!" in signs else 0


if __name__ == "__main__":
    sys.exit(main())
