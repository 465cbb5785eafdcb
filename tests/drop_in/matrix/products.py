"""The cells: every axis against every module, and any two values of the other axes together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
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
#: The modules, all of which train, that an axis is tried with: each treats its values otherwise.
_MODULES = {
    "batch": (*_KINDS, *_OTHERS),
    "optimizer": (*_KINDS, *_OTHERS[2:]),
    "pipeline": (*_KINDS, *_OTHERS[2:]),
    "rest": (*_KINDS, *_OTHERS),
}


def all_cells() -> list[Cell]:
    """Return each module alone, each axis against its modules, and the pairs."""
    cells = [Cell(module) for module in MODULES]
    for axis, values in AXES.items():
        cells += [Cell(module, **{axis: value}) for value in values for module in _MODULES[axis]]
    # Partial IKJTs have no weights.
    return [
        cell
        for cell in dict.fromkeys(cells + pair_cells())
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
    """Return cells in which any two values of ``_IN_PAIRS`` meet, and deduplicated ones.

    Arguments of a pipeline say when the memory of a batch is freed; codecs send the unique rows.
    """
    deduplicated = Cell("EmbeddingBagCollection", "deduplicated by dedup(loader)")
    return [
        *(Cell(*values) for values in covering(list(product(*_IN_PAIRS.values())), 2)),
        *(replace(deduplicated, pipeline=n) for n in PIPELINES if n.startswith(with_argument(""))),
        *(replace(deduplicated, rest=name) for name in REST if name.startswith("qcomms ")),
    ]


def sample(cells: Sequence[Cell]) -> list[Cell]:
    """Return some of the cells, with each value of every axis in one of them."""
    of_tuple = {astuple(cell): cell for cell in cells}
    return [of_tuple[found] for found in covering(list(of_tuple), 1)]
