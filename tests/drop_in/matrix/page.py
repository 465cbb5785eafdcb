"""The page of the matrix: made of outcomes, and read again by the test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from tests.drop_in.matrix.modules import MODULES, NOT_TRAINED
from tests.drop_in.matrix.names import PACKAGES, WITHOUT_CELL
from tests.drop_in.matrix.outcome import SIGNS, Outcome
from tests.drop_in.matrix.products import AXES, axis_cells, modules_of
from tests.drop_in.matrix.trainer import Cell

TITLES = {
    "batch": "Batches",
    "optimizer": "Optimizers of tables",
    "pipeline": "Training loops",
    "rest": "The rest",
}
#: Signs whose words stand below the tables.
_WITH_NOTES = "wrRct!"
_HEAD = """# The matrix of drop-in

Made by `make matrix-page`; do not edit. Each cell is a trainer on 2 gloo ranks, on CPU: a value of
every axis, trained three steps with `recd_plugins.wrap`, with TorchRec's sharders on the same plan,
and as a model in one piece that sees the batches of all ranks. Losses, predictions, an evaluation,
dense parameters and tables are compared, relative to what is larger than 1, and every table has to
have moved. A value that is not named is *plain* batches, *RowWiseAdagrad in backward*, *a plain
loop*, or *nothing* besides. [What is exact](exactness.md) says why.
"""


def write(outcomes: Mapping[Cell, Outcome]) -> str:
    """The page, in one order."""
    notes: dict[str, int] = {}

    def signed(cell: Cell) -> str:
        outcome = outcomes.get(cell)
        if outcome is None:
            return ""
        if outcome.sign not in _WITH_NOTES:
            return outcome.sign
        words = _words(outcome.said)
        return f"{outcome.sign} [{notes.setdefault(words, len(notes) + 1)}](#notes)"

    counts = Counter(outcome.sign for outcome in outcomes.values())
    lines = [_HEAD, "| sign | meaning | cells |", "|---|---|---|"]
    lines += [f"| `{sign}` | {words} | {counts[sign]} |" for sign, words in SIGNS.items()]
    lines += [
        f"| | all | {counts.total()} |",
        "",
        "## Modules",
        "",
        "| | module | |",
        "|---|---|---|",
    ]
    numbers = {module: number for number, module in enumerate(MODULES, 1)}
    lines += [f"| {n} | {module} | {signed(Cell(module))} |" for module, n in numbers.items()]
    lines += [
        "",
        "Not trained: " + "; ".join(f"{k}, {why}" for k, why in NOT_TRAINED.items()) + ".",
    ]
    trained = trained_modules(outcomes)
    lines += ["", "Below, columns are modules, by these numbers."]
    for axis, values in AXES.items():
        columns = modules_of(axis, trained)
        head = [str(numbers[module]) for module in columns]
        lines += ["", f"## {TITLES[axis]}", "", _row(["", *head]), _row(["---"] * (len(head) + 1))]
        for value in values:
            cells = [Cell(module, **{axis: value}) for module in columns]
            if Cell("", **{axis: value}) != Cell(""):
                lines.append(_row([value, *map(signed, cells)]))
    lines += ["", "## Any two values together", "", _row(["module", *AXES, ""]), _row(["---"] * 6)]
    single = {Cell(module) for module in MODULES}
    for axis in AXES:
        single |= set(axis_cells(axis, trained))
    for cell in sorted(outcomes.keys() - single):
        of_cell = [cell.module, *(getattr(cell, axis) for axis in AXES)]
        lines.append(_row([*of_cell, signed(cell)]))
    lines += ["", "## Notes", ""]
    lines += [f"{number}. {words}" for words, number in notes.items()]
    lines += ["", "## Classes without a cell", "", "Of " + ", ".join(PACKAGES) + ":", ""]
    why_not: dict[str, list[str]] = {}
    for name, why in WITHOUT_CELL.items():
        why_not.setdefault(why, []).append(name)
    lines += [f"- {why}: {', '.join(names)}" for why, names in why_not.items()]
    return "\n".join(lines) + "\n"


def trained_modules(outcomes: Mapping[Cell, Outcome]) -> list[str]:
    """The modules whose plainest trainer trains."""
    return [m for m in MODULES if m in {c.module for c in outcomes} and _trains(outcomes, m)]


def _trains(outcomes: Mapping[Cell, Outcome], module: str) -> bool:
    outcome = outcomes.get(Cell(module))
    return outcome is not None and outcome.sign in "=~+"


def signs(page: str) -> dict[Cell, str]:
    """The signs of all cells, as a page has them."""
    modules = list(MODULES)
    found: dict[Cell, str] = {}
    axes = {title: axis for axis, title in TITLES.items()}
    title, columns = "", list[str]()
    for line in page.splitlines():
        if line.startswith("## "):
            title, columns = line[3:], []
        if not line.startswith("| ") and not line.startswith("|  "):
            continue
        first, *rest = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if title == "Modules" and first.isdigit():
            found[Cell(modules[int(first) - 1])] = rest[1][:1]
        elif title in axes and not columns:
            columns = [modules[int(number) - 1] for number in rest]
        elif title in axes and first != "---":
            for module, sign in zip(columns, rest, strict=True):
                if sign:
                    found[Cell(module, **{axes[title]: first})] = sign[:1]
        elif title.startswith("Any two") and first in MODULES:
            *values, sign = rest
            found[Cell(first, *values)] = sign[:1]
    return found


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _words(said: str) -> str:
    """One line without paths, addresses and figures that differ from run to run."""
    first = re.sub(r"\s+", " ", said.split("\n\n")[0].replace("\n", " "))
    first = re.sub(r"\[?/__w/\S+ ?|0x[0-9a-f]+|\(/\S+\)", "", first).strip()
    first = first.replace("|", "; ").replace("<", "&lt;").replace(">", "&gt;").replace("*", r"\*")
    return first[:400] + (" ..." if len(first) > 400 else "")
