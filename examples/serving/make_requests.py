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


def requests(first: int, count: int) -> pa.Table:
    """Generate ``count`` requests. Users mostly click items of the categories in their history."""
    draw = np.random.default_rng([7, first])
    user = draw.integers(USERS, size=(count, 1))
    # A user likes every third category.
    category = (3 * draw.integers(CATEGORIES // 3, size=(count, HISTORY)) + user) % CATEGORIES
    history = draw.integers(ITEMS // CATEGORIES, size=category.shape) * CATEGORIES + category
    item = draw.integers(ITEMS, size=(count, CANDIDATES))
    is_liked = (item - user) % CATEGORIES % 3 == 0
    label = draw.random(item.shape) < np.where(is_liked, 0.6, 0.05)
    lists = {"user": user, "history": history, "history_category": category}
    columns = {name: each.repeat(CANDIDATES, axis=0) for name, each in lists.items()}
    columns |= {"item": item.reshape(-1, 1), "category": item.reshape(-1, 1) % CATEGORIES}
    number = np.arange(count * CANDIDATES) + first * CANDIDATES
    table = pa.table({name: list(each) for name, each in columns.items()})
    price = draw.random(item.size, dtype=np.float32)
    values = {"session_id": number // CANDIDATES, "ts": number, "label": label.ravel().astype(int)}
    for name, each in {**values, "price": price}.items():
        table = table.append_column(name, pa.array(each))
    return table


def main(folder: Path, num_requests: int) -> None:
    """Write ``num_requests`` requests to ``train``, and a fifth as many to ``test``."""
    splits = {"train": (0, num_requests), "test": (num_requests, num_requests // 5)}
    for split, numbers in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        file = folder / split / "requests.parquet"
        pq.write_table(requests(*numbers), file, row_group_size=9_500)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2_000)
