"""What came of a cell, in one sign, and the page of the matrix, which the test reads again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.drop_in.matrix.batches import BATCHES
from tests.drop_in.matrix.modules import MODULES, NOT_TRAINED
from tests.drop_in.matrix.optimizers import REST
from tests.drop_in.matrix.pipelines import PIPELINES
from tests.drop_in.matrix.products import AXES, axis_cells, modules_of
from tests.drop_in.matrix.run import Seen
from tests.drop_in.matrix.trainer import Cell

from recd_plugins.testing.device import DEVICE

SIGNS = {
    "=": "equal to TorchRec's, all numbers 0.0 apart, and within 1e-5 of a model in one piece",
    "~": "the same, within 1e-6 of TorchRec's (of unique rows in 16 bits, 1e-3)",
    "+": "equal to a model in one piece, where TorchRec fails or trains something else",
    "p": "trains where TorchRec fails, with nothing to compare it with",
    "w": "equal to TorchRec's, and a warning names what it does not do",
    "r": "refused by name, where TorchRec fails or trains something else",
    "R": "refused by name, where TorchRec trains",
    "c": "CUDA only: an operator or a class of TorchRec says that it has no CPU kernel",
    "t": "fails in TorchRec, in both",
    "!": "a fault",
}
# A model in one piece adds up in another order, and Adagrad divides by what is nearly nothing.
_NEAR_TRUTH = 1e-5
_CUDA = ("CUDA", "cuda", "GPU", "CPU mode", "'fbgemm' object has no attribute")


@dataclass(frozen=True)
class Outcome:
    """A sign of ``SIGNS``, and what was said."""

    sign: str
    said: str = ""


def outcome_of(cell: Cell, ranks: Sequence[Seen]) -> Outcome:
    """Of what the ranks saw."""
    ours = [seen.ours for seen in ranks]
    error = next((each.error for each in ours if each.error), "")
    stock_error = next((seen.stock_error for seen in ranks if seen.stock_error), "")
    stock_to_truth = _most([seen.stock_to_truth for seen in ranks])
    stock_is_right = not stock_error and (stock_to_truth is None or stock_to_truth <= _NEAR_TRUTH)
    changed = {seen.changed for seen in ranks} - {None}
    warned = " | ".join(dict.fromkeys(text for each in ours for text in each.warned))
    if error:
        wants_cuda = any(word in error for word in _CUDA) or PIPELINES[cell.pipeline].on_cuda
        if wants_cuda and stock_error and DEVICE.type == "cpu":
            return Outcome("c", error)
        if all(each.refused for each in ours if each.error):
            return Outcome("R" if stock_is_right and changed != {False} else "r", error)
        if stock_error:
            return Outcome("w" if warned else "t", warned or error)
        return Outcome("!", error)
    to_stock = _most([seen.to_stock for seen in ranks])
    to_truth = _most([seen.to_truth for seen in ranks])
    tables = {table for each in ours for table, *_ in each.tables}
    still = tables.difference(*(each.moved for each in ours))
    if PIPELINES[cell.pipeline].trains and (still or changed == {False}):
        what = f"never moved: {sorted(still)}" if still else "changes nothing"
        return Outcome("w", warned) if warned else Outcome("!", what)
    if to_truth is not None and to_truth > _NEAR_TRUTH:
        if to_stock is not None and to_stock <= REST[cell.rest].near and warned:
            return Outcome("w", warned)
        return Outcome("!", f"{to_truth:.1e} off, TorchRec {stock_to_truth} {stock_error}")
    if stock_error:
        return Outcome("p" if to_truth is None else "+", stock_error)
    if to_truth is not None and not stock_is_right:
        return Outcome("+", f"TorchRec is {stock_to_truth:.1e} off")
    if noted := BATCHES[cell.batch].noted:
        return Outcome("w", noted)
    assert to_stock is not None
    if to_stock > REST[cell.rest].near:
        return Outcome("!", f"{to_stock:.1e} off TorchRec's")
    return Outcome("=" if to_stock == 0.0 else "~")


def _most(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


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
