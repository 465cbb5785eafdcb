"""The cells: every axis against every module, and any two values of the other axes together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import product
from typing import Any

from tests.covering import covering
from tests.drop_in.matrix.batches import BATCHES
from tests.drop_in.matrix.modules import MODULES
from tests.drop_in.matrix.optimizers import OPTIMIZERS, REST
from tests.drop_in.matrix.pipelines import PIPELINES, with_argument
from tests.drop_in.matrix.trainer import Cell

AXES: dict[str, Mapping[str, Any]] = {
    "batch": BATCHES,
    "optimizer": OPTIMIZERS,
    "pipeline": PIPELINES,
    "rest": REST,
}
_KINDS = ("EmbeddingBagCollection", "EmbeddingCollection")
_OTHERS = (
    "weighted EmbeddingBagCollection",
    "FusedEmbeddingBagCollection",
    "FeatureProcessedEmbeddingBagCollection",
    "ManagedCollisionEmbeddingBagCollection",
    "ManagedCollisionEmbeddingCollection",
)
#: Modules that an axis is tried with: those that have a path of their own to what it changes.
_MODULES = {
    "batch": (*_KINDS, *_OTHERS),
    "optimizer": (*_KINDS, *_OTHERS[2:]),
    "pipeline": (*_KINDS, *_OTHERS[2:]),
    "rest": (*_KINDS, *_OTHERS),
}


def base_cells() -> list[Cell]:
    return [Cell(module) for module in MODULES]


def modules_of(axis: str, trained: Sequence[str]) -> list[str]:
    """The modules, of those that train at all, that an axis is tried with."""
    return [module for module in trained if module in _MODULES[axis]]


def axis_cells(axis: str, trained: Sequence[str]) -> list[Cell]:
    """An axis against the modules that train at all."""
    values = [value for value in AXES[axis] if getattr(Cell(""), axis) != value]
    cells = [
        Cell(module, **{axis: value}) for value in values for module in modules_of(axis, trained)
    ]
    # Partial IKJTs have no weights.
    return [
        cell
        for cell in cells
        if not (BATCHES[cell.batch].partial and MODULES[cell.module].weighted)
    ]


#: Values whose cells train, of each axis, for all pairs.
_IN_PAIRS: dict[str, tuple[str, ...]] = {
    "module": (
        "EmbeddingBagCollection",
        "EmbeddingCollection",
        "weighted EmbeddingBagCollection",
        "FeatureProcessedEmbeddingBagCollection",
        "ManagedCollisionEmbeddingBagCollection",
        "two modules with tables of equal names",
    ),
    "batch": (
        "plain",
        "deduplicated by dedup(loader)",
        "VBE and plain in turn",
        "VBE on one rank, plain on the other",
        "no row on a rank, last",
        "deduplicated, other sizes",
        "int32 ids",
    ),
    "optimizer": (
        "torch.optim.SGD in backward",
        "torchrec.optim.RowWiseAdagrad in backward",
        "EXACT_ADAGRAD by fused_params",
        "dense torchrec.optim.RowWiseAdagrad, data-parallel",
        "RowWiseAdagrad with warm-up",
    ),
    "pipeline": (
        "a plain loop",
        "TrainPipelineBase",
        "TrainPipelineSparseDist",
        "TrainPipelineSparseDistLite",
    ),
    "rest": (
        "nothing",
        "autocast",
        "gradient accumulation",
        "qcomms FP16",
        "constraints: row_wise",
        "stock state dict into ours",
        "unsharded state dict into ours",
    ),
}


def pair_cells() -> list[Cell]:
    """Cells in which any two values of ``_IN_PAIRS`` meet, and further ones of two values."""
    axes = list(_IN_PAIRS.values())
    left = {
        (one, value, other, others)
        for one in range(len(axes))
        for other in range(one + 1, len(axes))
        for value, others in product(axes[one], axes[other])
    }
    cells = []
    while left:
        chosen = _widest(axes, left)
        left -= _pairs(chosen)
        cells.append(Cell(*chosen))
    return cells + _deduplicated_in_pipelines() + _deduplicated_over_wires()


def _deduplicated_in_pipelines() -> list[Cell]:
    """Arguments of a pipeline that say what becomes of a batch's memory, and when, among others."""
    loops = [name for name in PIPELINES if name.startswith(with_argument(""))]
    return [
        Cell("EmbeddingBagCollection", "deduplicated by dedup(loader)", pipeline=loop)
        for loop in loops
    ]


def _deduplicated_over_wires() -> list[Cell]:
    """What is sent are as many rows as are unique, in the blocks of a codec."""
    return [
        Cell("EmbeddingBagCollection", "deduplicated by dedup(loader)", rest=name)
        for name in REST
        if name.startswith("qcomms ")
    ]


def sample(cells: Sequence[Cell]) -> list[Cell]:
    """Some of the cells, in which each value of every axis is."""
    of_tuple = {astuple(cell): cell for cell in cells}
    return [of_tuple[found] for found in covering(list(of_tuple), 1)]


def _widest(axes: Sequence[Sequence[str]], left: set[tuple[int, str, int, str]]) -> list[str]:
    """A cell with a pair that is left, and of each other axis the value that adds most."""
    one, value, other, others = min(left)
    chosen: dict[int, str] = {one: value, other: others}
    for axis, values in enumerate(axes):
        if axis not in chosen:
            added = [
                sum(_pair(axis, value, b, w) in left for b, w in chosen.items()) for value in values
            ]
            chosen[axis] = values[added.index(max(added))]
    return [chosen[axis] for axis in range(len(axes))]


def _pairs(cell: Sequence[str]) -> set[tuple[int, str, int, str]]:
    return {
        (one, cell[one], other, cell[other])
        for one in range(len(cell))
        for other in range(one + 1, len(cell))
    }


def _pair(one: int, value: str, other: int, others: str) -> tuple[int, str, int, str]:
    return (one, value, other, others) if one < other else (other, others, one, value)
