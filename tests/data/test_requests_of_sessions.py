"""Wrappers that group rows by request use the request column of a table with longer sessions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.small_registry import write_registry

from recd_plugins import load_registry
from recd_plugins.data.prepared import wrapped_dataset
from recd_plugins.interfaces import Dataset, Rows

USERS, REQUESTS, ROWS = 6, 4, 5
# Fewer rows than a session.
BATCH = 12


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table whose feature ``shown`` is the request of each row."""
    request = np.repeat(np.arange(USERS * REQUESTS), ROWS)
    columns = {
        "user": request // REQUESTS,
        "request": request,
        "shown": request,
        "item": np.arange(len(request)),
        "clicked": np.arange(len(request)) % ROWS == 0,
    }
    pq.write_table(pa.table(columns), tmp_path / "table.parquet")
    return tmp_path / "table.parquet"


def wrapped(path: Path, wrapper: dict[str, Any]) -> Dataset:
    columns = {"user": "session", "request": "request", "shown": "id", "item": "id"}
    columns["clicked"] = "label"
    options = {"path": str(path), "cache": str(path.parent), "columns": columns}
    registry = write_registry(
        path.parent, dataset={"use": "tables.table", "options": options, "wrap": [wrapper]}
    )
    dataset = wrapped_dataset(load_registry(registry))
    dataset.prepare()
    return dataset


def requests(batches: Iterable[Rows]) -> list[list[int]]:
    return [[id for (id,) in rows.data["shown"].to_pylist()] for rows in batches]


def test_whole_requests_keeps_requests_of_a_session_larger_than_a_batch(path: Path) -> None:
    dataset = wrapped(path, {"use": "recd.whole_requests"})
    reader = dataset.reader(rank=0, world_size=1, batch_size=BATCH, split="train")
    seen = [set(batch) for batch in requests(reader)]
    assert len(seen) > USERS
    assert sum(map(len, seen)) == len(set.union(*seen))


def test_negatives_in_request_come_from_the_request(path: Path) -> None:
    options = {"item": "item", "by": "in_request", "negatives": 2}
    dataset = wrapped(path, {"use": "ranking.negatives", "options": options})
    reader = dataset.reader(rank=0, world_size=1, batch_size=BATCH, split="train")
    for batch in requests(reader):
        assert all(len({*batch[n : n + 3]}) == 1 for n in range(0, BATCH, 3))
