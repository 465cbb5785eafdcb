"""The matrix of drop-in: no cell trains differently from stock TorchRec without a message."""

from __future__ import annotations

from itertools import product

import pytest
from tests.covering import by_night, covering, of_today
from tests.drop_in.matrix.axes import OPTIMIZERS, PIPELINES, REST
from tests.drop_in.matrix.batches import BATCHES
from tests.drop_in.matrix.modules import MODULES
from tests.drop_in.matrix.run import outcomes_of
from tests.drop_in.matrix.trainer import Cell

_PARTS = 24  # one of which runs by day; see tests/schedule.py
#: Modules that each axis is combined with.
_KINDS = (
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "FeatureProcessedEmbeddingBagCollection",
    "ManagedCollisionEmbeddingBagCollection",
)
#: Values of each axis that meet in pairs.
_IN_PAIRS = (
    (*_KINDS, "weighted EmbeddingBagCollection", "two modules with tables of equal names"),
    (
        "plain",
        "deduplicated by dedup(loader)",
        "VBE and plain in turn",
        "VBE on one rank, plain on the other",
        "no row on a rank, last",
        "deduplicated, other sizes",
        "int32 ids",
    ),
    (
        "SGD in backward",
        "RowWiseAdagrad in backward",
        "EXACT_SGD by fused_params",
        "dense RowWiseAdagrad, data-parallel",
        "RowWiseAdagrad with warm-up",
    ),
    (
        "a plain loop",
        "TrainPipelineBase",
        "TrainPipelineSparseDist",
        "TrainPipelineSparseDistLite",
    ),
    (
        "nothing",
        "autocast",
        "gradient accumulation",
        "qcomms FP16",
        "constraints: row_wise",
        "stock state dict into ours",
        "unsharded state dict into ours",
    ),
)
_BAGS, _DEDUP = "EmbeddingBagCollection", "deduplicated by dedup(loader)"


def all_cells() -> list[Cell]:
    """Return each module alone, each axis with some modules, and the pairs."""
    cells = [Cell(module) for module in MODULES]
    cells += [Cell(module, batch=name) for name in BATCHES for module in _KINDS]
    cells += [Cell(module, optimizer=name) for name in OPTIMIZERS for module in _KINDS[::3]]
    cells += [Cell(module, pipeline=name) for name in PIPELINES for module in _KINDS]
    cells += [Cell(module, rest=name) for name in REST for module in _KINDS]
    # Pipelines free the memory of batches early, and codecs round gradients of unique rows.
    cells += [Cell(_BAGS, _DEDUP, pipeline=name) for name in PIPELINES]
    cells += [Cell(_BAGS, _DEDUP, rest=name) for name in REST if name.startswith("qcomms ")]
    cells += [Cell(*values) for values in covering(list(product(*_IN_PAIRS)), 2)]
    return list(dict.fromkeys(cells))


@pytest.mark.parametrize("part", range(_PARTS))
def test_no_cell_trains_differently_without_a_message(part: int) -> None:
    cells = all_cells()[part::_PARTS]
    if not by_night():  # no cell that compiles or leaves ranks waiting for one another
        cells = [c for c in cells if "compile" not in c.rest and "feature" not in c.batch]
    outcomes = outcomes_of(cells)
    assert {str(cell): each.said for cell, each in outcomes.items() if each.sign == "fault"} == {}


def test_kernels_treat_gradients_of_unique_rows_like_those_of_all_rows() -> None:
    """FBGEMM's clipping and decay must not see one sum for several equal rows."""
    cells = [Cell(_BAGS, _DEDUP, optimizer=name) for name in OPTIMIZERS if "fused_params" in name]
    clips = Cell(_KINDS[3], _DEDUP, optimizer="EXACT_SGD fused_params gradient_clipping")
    outcomes = outcomes_of([clips, *of_today(cells, len(cells) // 5)])
    assert outcomes[clips].sign == "equal"
    found = {str(cell): outcome.sign for cell, outcome in outcomes.items()}
    assert set(found.values()) <= {"equal", "refused", "TorchRec fails"}, found
