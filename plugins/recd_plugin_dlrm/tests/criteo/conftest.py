"""Small files of Criteo's format, and units so small that they have several."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from recd_plugin_dlrm.criteo import days, tsv
from recd_plugin_dlrm.criteo.convert import ConvertOptions, convert
from recd_plugin_dlrm.tests.criteo.criteo_cases import UNIT_ROWS, WriteDays, sample_rows, write_day


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (days, tsv):
        monkeypatch.setattr(module, "UNIT_ROWS", UNIT_ROWS)


@pytest.fixture(scope="session")
def written_days(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
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
    def write(file_format: str, *rows: int, kaggle: bool = False) -> Path:
        folder = tmp_path / file_format
        shutil.copytree(written_days(file_format, rows, kaggle), folder, dirs_exist_ok=True)
        return folder / "new" if file_format == "parquet" else folder

    return write
