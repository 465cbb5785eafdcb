"""Run the cells of the matrix, count their signs and write them to a page.

With ``--keep``, outcomes stay in a file, and a run that was stopped continues from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from pathlib import Path

from tests.drop_in.matrix.products import AXES, all_cells, sample
from tests.drop_in.matrix.run import AT_A_TIME, SIGNS, Outcome, outcomes_of
from tests.drop_in.matrix.trainer import Cell

from recd_plugins.testing.gloo import end_ranks

#: Signs by what a reader asks for.
_COUNTED = {
    "equal": "=~+pw",
    "refused": "rR",
    "CUDA only": "c",
    "TorchRec fails": "t",
    "faults": "!",
}


def run(cells: Iterable[Cell], kept: Path | None) -> dict[Cell, Outcome]:
    """Return the outcomes of cells; those in ``kept``, a file of JSON lines, are read."""
    known: dict[Cell, Outcome] = {}
    if kept is not None and kept.exists():
        for line in kept.read_text(encoding="utf-8").splitlines():
            values, *outcome = json.loads(line)
            known[Cell(*values)] = Outcome(*outcome)
    cells = list(cells)
    left = [cell for cell in cells if cell not in known]
    for start in range(0, len(left), AT_A_TIME):
        for cell, found in outcomes_of(left[start : start + AT_A_TIME]).items():
            known[cell] = found
            print(found.sign, cell, found.said[:300].replace("\n", " "), flush=True)
            if kept is not None:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([astuple(cell), *astuple(found)]) + "\n")
    return {cell: known[cell] for cell in cells}


def page(outcomes: Mapping[Cell, Outcome]) -> str:
    """Return the outcomes as Markdown tables."""
    signs = [outcome.sign for outcome in outcomes.values()]
    lines = ["# The matrix of drop-in", "", "| sign | meaning | cells |", "|---|---|---|"]
    lines += [f"| `{sign}` | {words} | {signs.count(sign)} |" for sign, words in SIGNS.items()]
    lines += ["", f"| module | {' | '.join(AXES)} | sign | note |", "|---|---|---|---|---|---|---|"]
    for cell, outcome in sorted(outcomes.items()):
        note = " ".join(outcome.said.split())[:200].replace("|", ";").replace("<", "&lt;")
        lines.append(f"| {' | '.join((*astuple(cell), outcome.sign, note))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Return 1 if a cell has a fault, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.drop_in.matrix", description=__doc__)
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the page there")
    parser.add_argument("--keep", metavar="FILE", type=Path, help="file of outcomes to continue")
    parser.add_argument("--sample", action="store_true", help="run each value of the axes once")
    given = parser.parse_args()
    try:
        outcomes = run(sample(all_cells()) if given.sample else all_cells(), given.keep)
    finally:
        end_ranks()
    if given.write is not None:
        given.write.write_text(page(outcomes), encoding="utf-8")
    signs = [outcome.sign for outcome in outcomes.values()]
    print(", ".join(f"{words} {sum(map(signs.count, of))}" for words, of in _COUNTED.items()))
    return 1 if "!" in signs else 0


if __name__ == "__main__":
    sys.exit(main())
