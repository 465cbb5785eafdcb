"""The matrix of drop-in: no cell trains differently in silence, and no value is missing."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torchrec.distributed
import torchrec.models
import torchrec.modules
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.covering import by_night, of_today
from tests.drop_in.matrix.modules import FIELDS, MODULES, NOT_TRAINED
from tests.drop_in.matrix.optimizers import CLASSES, KERNELS, OPTIMIZERS
from tests.drop_in.matrix.pipelines import PIPELINES, arguments_of, of_library, with_argument
from tests.drop_in.matrix.products import AXES, all_cells
from tests.drop_in.matrix.run import outcomes_of
from tests.drop_in.matrix.trainer import Cell
from torch import nn
from torchrec.distributed import train_pipeline
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

_BY_DAY = 20


def test_no_cell_trains_something_else_in_silence() -> None:
    outcomes = outcomes_of(_of_today(all_cells()))
    faults = {str(cell): each.said for cell, each in outcomes.items() if each.sign == "!"}
    assert faults == {}


def test_what_kernels_do_to_gradients_they_do_to_those_of_all_rows() -> None:
    """Gradients of equal rows come as one where rows are stored once."""
    of_kernels = [name for name in OPTIMIZERS if "fused_params" in name]
    cells = [
        Cell("EmbeddingBagCollection", "deduplicated by dedup(loader)", optimizer=name)
        for name in of_kernels
    ]
    clips = Cell(
        "ManagedCollisionEmbeddingBagCollection",
        "deduplicated by dedup(loader)",
        optimizer="EXACT_SGD fused_params gradient_clipping",
    )
    outcomes = outcomes_of([clips, *of_today(cells, len(cells) // 5)])
    assert outcomes[clips].sign in "=~"
    found = {str(cell): outcome.sign for cell, outcome in outcomes.items()}
    assert {name: sign for name, sign in found.items() if sign not in "=~rRct"} == {}


def _of_today(cells: list[Cell]) -> list[Cell]:
    """All by night; by day some, others each day: none that compiles or leaves ranks waiting."""
    if by_night():
        return cells
    quick = [
        cell
        for cell in cells
        if "compile" not in cell.rest
        and "feature" not in cell.batch
        and not PIPELINES[cell.pipeline].on_cuda
    ]
    return list(of_today(quick, len(quick) // _BY_DAY))


def test_every_module_type_of_the_library_is_named() -> None:
    for package in (torchrec.distributed, torchrec.modules, torchrec.models):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    types = {kind for sharder in _below(ModuleSharder) if (kind := _module_type(sharder))}
    takers = {kind.__name__ for kind in _below(nn.Module) if _takes_a_kjt(kind)}
    assert {"EmbeddingBagCollection", "EmbeddingCollection"} <= types & takers
    built = {kind.__name__ for part in _parts() for kind in type(part).__mro__}
    assert (types | takers) - built - NOT_TRAINED.keys() - _ON_CUDA == set()


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (EmbeddingBagConfig, {"pooling"}),
        (EmbeddingConfig, set()),
    ],
)
def test_every_field_of_a_table_is_in_a_cell(kind: Any, others: set[str]) -> None:
    named = {"name", "embedding_dim", "num_embeddings", "feature_names", "data_type"}
    assert {field.name for field in fields(kind)} - named - others == FIELDS.keys()


def test_every_argument_of_modules_and_pipelines_is_in_a_cell() -> None:
    bags = {"self", "tables", "is_weighted", "device"}
    assert inspect.signature(EmbeddingBagCollection.__init__).parameters.keys() == bags
    sequences = inspect.signature(EmbeddingCollection).parameters.keys() - {"tables", "device"}
    assert [a for a in sequences if f"EmbeddingCollection, {a}" not in MODULES] == []
    of_pipeline = arguments_of(TrainPipelineSparseDist)
    assert [a for a in of_pipeline if with_argument(a) not in PIPELINES] == []


def test_every_pipeline_of_the_library_is_in_the_axis() -> None:
    public = {
        name
        for name, kind in vars(train_pipeline).items()
        if isinstance(kind, type) and ("Pipeline" in name or "Thread" in name)
    }
    helpers = {"TrainPipeline", "TrainPipelineContext"}
    named = " ".join(PIPELINES)
    assert [name for name in public - helpers if name not in named] == []
    assert of_library().keys() <= PIPELINES.keys()


@pytest.mark.parametrize(
    ("axis", "kinds", "value"),
    [
        ("optimizer", EmbOptimType, "{0.name} by fused_params"),
        ("optimizer", CLASSES, "{0.__name__} in backward"),
        ("rest", CommType, "qcomms {0.name}"),
        ("rest", ShardingType, "constraints: {0.value}"),
        ("rest", KERNELS, "constraints: kernel {0.value}"),
    ],
)
def test_every_kind_of_the_library_is_in_its_axis(
    axis: str, kinds: Iterable[Any], value: str
) -> None:
    assert [kind for kind in kinds if not any(value.format(kind) in v for v in AXES[axis])] == []


#: Their constructors refuse CPU, and their cells say so.
_ON_CUDA = {"FusedEmbeddingCollection", "ITEPEmbeddingBagCollection", "ITEPEmbeddingCollection"}


def _below(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _module_type(sharder: type) -> str:
    if sharder is BaseEmbeddingSharder or not sharder.__module__.startswith("torchrec."):
        return ""
    try:
        return str(sharder.module_type.fget(object.__new__(sharder)).__name__)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # abstract
        return ""


def _takes_a_kjt(kind: type) -> bool:
    if not kind.__module__.startswith(("torchrec.modules.", "torchrec.models.")):
        return False
    arguments = inspect.signature(kind.forward).parameters.values()  # type: ignore[attr-defined]
    return any("KeyedJaggedTensor" in str(each.annotation) for each in arguments)


def _parts() -> Iterator[object]:
    for name, module in MODULES.items():
        if name not in _ON_CUDA:
            yield from module.build().modules()
