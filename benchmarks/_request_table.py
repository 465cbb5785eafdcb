"""Synthetic ranking requests with lists of candidates, and their registry from ``recd init``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner

from recd_plugins.cli import main

#: Candidates per request, items per history, and number of distinct items.
CANDIDATES, HISTORY, _ITEMS = 38, 30, 20_000


def write_requests(folder: Path, rows: int, history: int = HISTORY) -> Path:
    """Write a table of requests with about ``rows`` candidates, and return its registry file."""
    table, registry = folder / "requests.parquet", folder / "requests.yaml"
    if not table.exists():
        pq.write_table(request_table(-(-rows // CANDIDATES), history), table)
    columns = ["--session", "user", "--request", "request", "--test", "0"]
    done = CliRunner().invoke(main, ["init", str(table), str(registry), "--force", *columns])
    assert done.exit_code == 0, done.output
    return registry


def request_table(num: int, items: int) -> pa.Table:
    """Return a table of ``num`` requests with lists of candidate structs and histories."""
    draw = np.random.default_rng(0)
    user = draw.integers(0, max(2, num // 4), num)
    taste = draw.integers(0, _ITEMS, num)
    history = (taste[:, None] + draw.geometric(0.01, (num, items))) % _ITEMS
    item = (taste[:, None] + draw.geometric(0.005, (num, CANDIDATES))) % _ITEMS
    near = np.exp(-((item - taste[:, None]) % _ITEMS) / 200)
    clicked = draw.random((num, CANDIDATES)) < 0.3 * near
    starts = np.arange(num + 1, dtype=np.int32)
    candidates = pa.StructArray.from_arrays(
        [
            pa.array(item.ravel()),
            pa.array(np.tile(np.arange(CANDIDATES), num)),
            pa.array(draw.gamma(2.0, 10.0, item.size)),
            pa.array(clicked.ravel()),
        ],
        names=["item_id", "position", "price", "click"],
    )
    return pa.table(
        {
            "request": np.arange(num),
            "user": user,
            "country": np.array(["de", "fr", "it", "jp", "us"])[user % 5],
            "history": pa.ListArray.from_arrays(starts * items, history.ravel()),
            "ts": pa.array(1_700_000_000_000 + np.arange(num) * 250, pa.timestamp("ms")),
            "shown": pa.ListArray.from_arrays(starts * CANDIDATES, candidates),
        }
    )
