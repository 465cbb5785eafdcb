from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_tables.table import Table
from recd_plugins.api import arrow, readers
from recd_plugins.interfaces import Split

#: A use of each column of ``clicks``.
COLUMNS = {
    "user": ["session", "id"],
    "when": "time",
    "item": "id",
    "history": "ids",
    "price": {"as": "number", "missing": 0},
    "clicked": "label",
}


def write(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def clicks(num_rows: int = 60) -> pa.Table:
    """Rows of users with text, gaps, lists and times; each row's item is its number."""
    rows = range(num_rows)
    seconds = pa.array([1_700_000_000 + 60 * (row * 37 % num_rows) for row in rows])
    return pa.table(
        {
            "user": [f"u{row % 7}" for row in rows],
            "when": seconds.cast(pa.timestamp("s")),
            "item": pa.array(rows, pa.int64()),
            "history": [[f"h{row % 7}", f"h{row % 3}"] * (row % 2) for row in rows],
            "price": [None if row % 5 == 0 else row / 4 for row in rows],
            "clicked": [row % 3 == 0 for row in rows],
        }
    )


def table(path: Path, **options: object) -> Table:
    given = {"columns": COLUMNS, "path": path, "cache": path.parent / "imports", **options}
    return Table(Table.Options.model_validate(given))


def rows_of(dataset: Table, split: Split = "train") -> dict[str, list]:
    sparse = dataset.schema().sparse
    found: dict[str, list] = {}
    stored = dataset._table_of(split)
    pieces = [readers.Piece(unit, 0, unit.num_rows) for unit in stored.units]
    for rows in stored.read(pieces, stored.schema):
        for name in rows.data.schema.names:
            if name in sparse:
                ids, offsets = arrow.sparse_column(rows, name)
                values = [ids[start:end].tolist() for start, end in pairwise(offsets)]
            else:
                values = rows.data[name].to_pylist()
            found.setdefault(name, []).extend(values)
    return found


def by_row(dataset: Table, split: Split = "train") -> dict[str, list]:
    found = rows_of(dataset, split)
    order = sorted(range(len(found["_row"])), key=lambda at: found["_row"][at])
    return {name: [values[at] for at in order] for name, values in found.items()}
