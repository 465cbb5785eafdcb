"""Folders of tables of other libraries are not read as the files that lie in them."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugins.data.parquet import ParquetTable
from recd_plugins.runtime.errors import DataError

MARKS = {
    "_delta_log/00000000000000000000.json": "Delta",
    ".hoodie/hoodie.properties": "Hudi",
    "metadata/00000-a.metadata.json": "Iceberg",
}


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_table_of_another_library_is_refused(tmp_path: Path, scheme: str, mark: str) -> None:
    store = fsspec.filesystem("memory" if scheme else "file")
    top = f"/folders/{mark.partition('/')[0]}" if scheme else str(tmp_path)
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), file)
    store.makedirs(f"{top}/table/day=1/hour=2")
    store.pipe(f"{top}/table/day=1/hour=2/x.parquet", file.getvalue().to_pybytes())
    below = [f"{top}{part}" for part in ("", "/table", "/table/day=1/hour=2")]
    places = [f"memory:/{part}" if scheme else Path(part) for part in below]
    for place in places:
        assert ParquetTable(place).units
    store.makedirs(f"{top}/table/{mark.rpartition('/')[0]}", exist_ok=True)
    store.pipe(f"{top}/table/{mark}", b"{}")
    for place in places[:2]:
        with pytest.raises(DataError, match=rf"table: the format is {MARKS[mark]}, whose files"):
            ParquetTable(place)
