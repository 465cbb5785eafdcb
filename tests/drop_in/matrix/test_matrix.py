"""The matrix of drop-in: its page is what the cells give, and its axes are those of the library."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torchrec.distributed
from hypothesis import settings
from tests.drop_in.matrix.__main__ import outcomes_of
from tests.drop_in.matrix.modules import MODULES, NOT_TRAINED
from tests.drop_in.matrix.page import TITLES, signs
from tests.drop_in.matrix.products import (
    AXES,
    axis_cells,
    base_cells,
    modules_of,
    pair_cells,
)
from tests.drop_in.matrix.trainer import Cell
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.types import ModuleSharder

PAGE = Path(__file__).parents[3] / "docs" / "exactness_matrix.md"
_BY_DAY = 30


@pytest.fixture(scope="module")
def page() -> dict[Cell, str]:
    return signs(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_every_cell_and_no_fault(page: dict[Cell, str]) -> None:
    trained = [cell.module for cell in base_cells() if page[cell] in "=~+"]
    cells = {*base_cells(), *pair_cells()}
    for axis in AXES:
        cells |= set(axis_cells(axis, trained))
    assert cells == page.keys()
    assert [str(cell) for cell, sign in page.items() if sign not in "=~+pwrRct"] == []


def test_the_page_is_true(page: dict[Cell, str]) -> None:
    outcomes = outcomes_of(_of_today(page))
    # Sums are added in another order on other processors.
    got = {str(cell): outcome.sign.replace("~", "=") for cell, outcome in outcomes.items()}
    assert got == {str(cell): page[cell].replace("~", "=") for cell in outcomes}


def _of_today(page: dict[Cell, str]) -> list[Cell]:
    """All by night; by day some of all axes, but for those that compile or leave ranks waiting."""
    if settings.get_current_profile_name() == "nightly":
        return list(page)
    quick = [
        cell
        for cell, sign in page.items()
        if sign in "=~rRw" and "compile" not in cell.rest and "feature" not in cell.batch
    ]
    return quick[:: len(quick) // _BY_DAY]


def test_every_module_type_that_has_a_sharder_is_named() -> None:
    for found in pkgutil.iter_modules(torchrec.distributed.__path__, "torchrec.distributed."):
        importlib.import_module(found.name)
    types = {kind for sharder in _below(ModuleSharder) if (kind := _module_type(sharder))}
    built = {type(part).__name__ for part in _parts()}
    assert types - built - NOT_TRAINED.keys() - _ON_CUDA == set()


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


def _parts() -> Iterator[object]:
    for name, module in MODULES.items():
        if name not in _ON_CUDA:
            yield from module.build().modules()


def test_axes_have_titles() -> None:
    assert TITLES.keys() == AXES.keys()
    assert modules_of("optimizer", ["EmbeddingTower"]) == []
