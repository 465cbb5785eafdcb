"""Runs every cell of the trainer matrix and writes the outcomes as a page."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import astuple, fields
from pathlib import Path

from tests.drop_in.matrix.run import Outcome, outcomes_of
from tests.drop_in.matrix.test_matrix import all_cells
from tests.drop_in.matrix.trainer import Cell

from recd_plugins.testing.gloo import end_ranks

_AT_A_TIME = 6


def run(cells: list[Cell], kept: Path) -> dict[Cell, Outcome]:
    """Return the outcomes of all cells; those in ``kept``, a file of JSON lines, are not run."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    found = {Cell(*cell): Outcome(*outcome) for cell, outcome in map(json.loads, lines)}
    left = [cell for cell in cells if cell not in found]
    for start in range(0, len(left), _AT_A_TIME):
        for cell, outcome in outcomes_of(left[start : start + _AT_A_TIME]).items():
            found[cell] = outcome
            print(outcome.sign, cell, outcome.said[:200].replace("\n", " "), flush=True)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps([astuple(cell), astuple(outcome)]) + "\n")
    return {cell: found[cell] for cell in cells}


def page(outcomes: dict[Cell, Outcome]) -> str:
    """Return the number of cells by outcome, and a line per cell, as Markdown."""
    counts = Counter(outcome.sign for outcome in outcomes.values())
    lines = ["# Trainer matrix", "", "| outcome | cells |", "|---|---|"]
    lines += [f"| {sign} | {count} |" for sign, count in counts.most_common()]
    names = [field.name for field in fields(Cell)]
    lines += ["", f"| {' | '.join(names)} | outcome | message |", "|---" * (len(names) + 2) + "|"]
    for cell, outcome in outcomes.items():
        said = " ".join(outcome.said.split())[:200].replace("|", ";").replace("<", "&lt;")
        lines.append(f"| {' | '.join((*astuple(cell), outcome.sign, said))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drop_in.matrix", description=__doc__)
    parser.add_argument("--write", metavar="PAGE", type=Path, required=True)
    parser.add_argument("--keep", metavar="FILE", type=Path, required=True, help="to continue from")
    given = parser.parse_args()
    try:
        outcomes = run(all_cells(), given.keep)
    finally:
        end_ranks()
    given.write.write_text(page(outcomes), encoding="utf-8")
    return int(any(outcome.sign == "fault" for outcome in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
