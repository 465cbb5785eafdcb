from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recd_plugin_tables.tests.helpers import clicks


@pytest.fixture
def path(tmp_path) -> Path:
    pq.write_table(clicks(), tmp_path / "clicks.parquet", row_group_size=17)
    return tmp_path / "clicks.parquet"
