"""A small table of sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import sharded

from recd_plugin_recd.papercal_table import TableOptions, write_table


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scars") / "table"
    write_table(folder, TableOptions(rows=2048, row_group_rows=1024))
    return folder


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    with sharded.one_rank():
        yield
