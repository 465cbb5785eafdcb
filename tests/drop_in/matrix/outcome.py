"""What came of a cell, in one sign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.drop_in.matrix.batches import BATCHES
from tests.drop_in.matrix.pipelines import PIPELINES
from tests.drop_in.matrix.rest import REST
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
_CUDA = ("CUDA", "cuda", "GPU", "'fbgemm' object has no attribute")


@dataclass(frozen=True)
class Outcome:
    """A sign of ``SIGNS``, and what was said."""

    sign: str
    said: str = ""


def outcome_of(cell: Cell, ranks: Sequence[Seen]) -> Outcome:
    """Of what the ranks saw."""
    error = next((seen.error for seen in ranks if seen.error), "")
    stock_error = next((seen.stock_error for seen in ranks if seen.stock_error), "")
    stock_to_truth = _most([seen.stock_to_truth for seen in ranks])
    stock_is_right = not stock_error and (stock_to_truth is None or stock_to_truth <= _NEAR_TRUTH)
    changed = {seen.changed for seen in ranks} - {None}
    if error:
        wants_cuda = any(word in error for word in _CUDA) or PIPELINES[cell.pipeline].on_cuda
        if wants_cuda and stock_error and DEVICE.type == "cpu":
            return Outcome("c", error)
        if all(seen.refused for seen in ranks if seen.error):
            return Outcome("R" if stock_is_right and changed != {False} else "r", error)
        warned = " | ".join(dict.fromkeys(text for seen in ranks for text in seen.warned))
        if stock_error:
            return Outcome("w" if warned else "t", warned or error)
        return Outcome("!", error)
    to_stock = _most([seen.to_stock for seen in ranks])
    to_truth = _most([seen.to_truth for seen in ranks])
    warned = " | ".join(dict.fromkeys(text for seen in ranks for text in seen.warned))
    tables = frozenset[str]().union(*(seen.tables for seen in ranks))
    moved = frozenset[str]().union(*(seen.moved for seen in ranks))
    if PIPELINES[cell.pipeline].trains and (tables - moved or changed == {False}):
        what = f"never moved: {sorted(tables - moved)}" if tables - moved else "changes nothing"
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
