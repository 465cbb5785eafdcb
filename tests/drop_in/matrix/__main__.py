"""All cells of the matrix of drop-in: ``python -m tests.drop_in.matrix [--write FILE]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.drop_in.matrix.outcome import SIGNS, Outcome, outcome_of
from tests.drop_in.matrix.page import trained_modules, write
from tests.drop_in.matrix.products import AXES, axis_cells, base_cells, pair_cells
from tests.drop_in.matrix.run import train_cells
from tests.drop_in.matrix.trainer import Cell

from recd_plugins.errors import RecdError
from recd_plugins.testing.gloo import end_ranks, run_on_ranks

_AT_A_TIME = 6  # cells whose wait for ranks that fail fits into the time of a call


def outcomes_of(cells: list[Cell], *, tell: bool = False) -> dict[Cell, Outcome]:
    """What becomes of cells; those that end a rank are faults."""
    found: dict[Cell, Outcome] = {}
    for start in range(0, len(cells), _AT_A_TIME):
        part = cells[start : start + _AT_A_TIME]
        try:
            seen = run_on_ranks(train_cells, 2, part)
            found |= {c: outcome_of(c, of) for c, *of in zip(part, *seen, strict=True)}
        except RecdError as error:
            if len(part) == 1:
                found[part[0]] = Outcome("!", str(error))
            else:
                for cell in part:
                    found |= outcomes_of([cell])
        if tell:
            for cell in part:
                print(found[cell].sign, cell, found[cell].said[:300].replace("\n", " "), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drop_in.matrix", description=__doc__)
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the page there")
    file: Path | None = parser.parse_args().write
    outcomes = outcomes_of(base_cells(), tell=True)
    trained = trained_modules(outcomes)
    for axis in AXES:
        outcomes |= outcomes_of(axis_cells(axis, trained), tell=True)
    outcomes |= outcomes_of(pair_cells(), tell=True)
    end_ranks()
    if file is not None:
        file.write_text(write(outcomes), encoding="utf-8")
    faults = [cell for cell, outcome in outcomes.items() if outcome.sign == "!"]
    for sign, words in SIGNS.items():
        print(f"{sum(o.sign == sign for o in outcomes.values()):5} {sign}  {words}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
