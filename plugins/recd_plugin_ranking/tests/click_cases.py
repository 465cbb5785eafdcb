from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ITEMS = 12


def clicks(path: Path, *, clicked: bool = True, rows: int = 75) -> Path:
    """Sessions of three rows that share a history; an item's colour and price go by the item."""
    generator = np.random.default_rng(0)
    items = generator.choice(ITEMS, rows, p=np.arange(1, ITEMS + 1) / (ITEMS * (ITEMS + 1) / 2))
    sessions = np.arange(rows) // 3
    labels = np.ones(rows) if clicked else (np.arange(rows) % 3 == 0)
    table = pa.table(
        {
            "session_id": sessions,
            "ts": np.arange(rows),
            "label": labels.astype(np.int8),
            "item": [[int(item)] for item in items],
            "colour": [[int(item) % 5, 7] for item in items],
            "price": (items / 4).astype(np.float32),
            "history": [[int(s) % ITEMS, (int(s) + 1) % ITEMS] for s in sessions],
        }
    )
    pq.write_table(table, path, row_group_size=20)
    return path


def with_column(path: Path, name: str, values: pa.Array) -> Path:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), path)
    return path
