"""Generates random training requests, each with a user history and 38 candidate items.

The table has one row per candidate.

python make_requests.py data
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CANDIDATES, HISTORY = 38, 100
USERS, ITEMS, CATEGORIES = 5_000, 20_000, 50
LISTS = ("user", "history", "history_category", "item", "category")


def requests(first: int, count: int) -> pa.Table:
    """Generate ``count`` requests. Users mostly click items of the categories in their history."""
    columns: dict[str, list[object]] = {
        name: [] for name in ("session_id", "ts", "label", *LISTS, "price")
    }
    for request in range(first, first + count):
        random = np.random.default_rng([7, request])
        user = int(random.integers(USERS))
        taste = np.random.default_rng(user).choice(CATEGORIES, 15, replace=False)
        history = (random.integers(ITEMS // CATEGORIES, size=HISTORY) * CATEGORIES).astype(int)
        history += random.choice(taste, HISTORY)
        for candidate in range(CANDIDATES):
            item = int(random.integers(ITEMS))
            liked = item % CATEGORIES in taste
            row = (
                *(request, request * CANDIDATES + candidate),
                int(random.random() < (0.6 if liked else 0.05)),
                *([user], history.tolist(), (history % CATEGORIES).tolist()),
                *([item], [item % CATEGORIES]),
                float(random.random()),
            )
            for name, value in zip(columns, row, strict=True):
                columns[name].append(value)
    types = {name: pa.list_(pa.int64()) for name in LISTS} | {"price": pa.float32()}
    return pa.table({name: pa.array(each, types.get(name)) for name, each in columns.items()})


def main(folder: Path, num_requests: int) -> None:
    """Write ``num_requests`` requests to ``train``, and a fifth as many to ``test``."""
    for split, first, count in [
        ("train", 0, num_requests),
        ("test", num_requests, num_requests // 5),
    ]:
        (folder / split).mkdir(parents=True, exist_ok=True)
        pq.write_table(
            requests(first, count), folder / split / "requests.parquet", row_group_size=9_500
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2_000)
