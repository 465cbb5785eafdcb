"""Small files of Criteo's format, and units so small that they have several."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.covering import by_night, covering

from recd_plugin_dlrm.criteo import days, tsv
from recd_plugin_dlrm.criteo.convert import ConvertOptions, convert
from recd_plugin_dlrm.tests.criteo.criteo_cases import UNIT_ROWS, WriteDays, sample_rows, write_day


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (days, tsv):
        monkeypatch.setattr(module, "UNIT_ROWS", UNIT_ROWS)


@pytest.fixture(scope="session")
def written_days(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes days once, to be copied."""

    @cache
    def write(file_format: str, rows: tuple[int, ...], kaggle: bool) -> Path:
        folder = tmp_path_factory.mktemp("days")
        for number, num_rows in enumerate(rows):
            name = "train" if kaggle else f"day_{number}"
            write_day(folder, name, file_format, sample_rows(num_rows, number))
        if file_format == "parquet":
            options = ConvertOptions(folder / "tsv", folder / "new", part_rows=50, row_group_rows=8)
            convert(options)
        return folder

    return write


@pytest.fixture
def write_days(tmp_path: Path, written_days: Callable[..., Path]) -> WriteDays:
    """Writes days of so many rows in a format: the same rows in each."""

    def write(file_format: str, *rows: int, kaggle: bool = False) -> Path:
        folder = tmp_path / file_format
        shutil.copytree(written_days(file_format, rows, kaggle), folder, dirs_exist_ok=True)
        return folder / "new" if file_format == "parquet" else folder

    return write


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """By day any two of a setting, a format and a test of the contract meet; by night all three."""
    cells = {}
    for item in items:
        if item.path == Path(__file__).with_name("test_contract.py"):
            assert isinstance(item, pytest.Function)
            params = dict(item.callspec.params)
            cells[item.cls, params.pop("plugin"), (item.originalname, *params.values())] = item
    if not by_night():
        chosen = set(covering(list(cells), 2))
        left_out = {item for cell, item in cells.items() if cell not in chosen}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
