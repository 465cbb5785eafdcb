"""Histories of 200 events read from a store, compared to lists in a table in layout list_dict.

Written bytes are the imported tables and the store. Read bytes are the columns that an epoch reads.
CPU time is reading and conversion to tensors, in alternating passes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks._measure import Findings, Size, in_turn, lower
from recd_plugin_recd.partial_ikjt import PartialIkjtConverter
from recd_plugin_tables.histories.build import EventColumns, build_store
from recd_plugin_tables.histories.store import EventStore
from recd_plugin_tables.sources import open_source
from recd_plugin_tables.table import Table
from recd_plugin_tables.values import mixed
from recd_plugins.api import list_dict
from recd_plugins.runtime.machine import keep_freed_memory

_USERS: dict[Size, int] = {"tiny": 20, "small": 800, "reference": 4000}
# As in PAPERCAL: rows of a visit, probability that the next row has another list, and item ids,
# which are log-uniform ranks hashed to 63 bits.
_VISITS, _ROWS, _CHANGE, _ITEMS = 10, 16, 0.125, 2_000_000
_LAST, _BATCH, _START = 200, 512, 1_700_000_000


def run(size: Size) -> Findings:
    """Write, read and convert both ways."""
    keep_freed_memory()
    rows, events = sessions(_USERS[size])
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), rows, events, turns=1 if size == "tiny" else 5)
    goals = {"bytes_written": 0.5, "bytes_read": 0.6, "cpu_seconds": 1.0}
    return Findings(
        f"{_USERS[size]} users with {_LAST} earlier clicks and {_VISITS} visits of {_ROWS} rows, "
        f"{_CHANGE} clicks per row; batches of {_BATCH}, recd.partial_ikjt",
        [lower(f"history_{n}_over_list_dict", found[n], goal=goal) for n, goal in goals.items()],
    )


def compare(folder: Path, rows: pa.Table, events: pa.Table, turns: int) -> dict[str, Any]:
    """Return each figure of late histories, divided by the figure of ``list_dict``."""
    path = folder / "store.parquet"
    pq.write_table(events, folder / "events.parquet")
    columns = EventColumns("user", "ts", ("item",), "s")
    build_store(open_source(folder / "events.parquet"), path, columns, lambda _: None)
    store = EventStore(path)
    windows = store.windows(rows["user"].to_numpy(), rows["ts"].to_numpy() * 10**6, _LAST)
    clicks = list_dict.to_lists(store.lists("item", *windows))
    pq.write_table(rows, folder / "rows.parquet")
    pq.write_table(rows.append_column("clicks", clicks), folder / "lists.parquet")
    history = {"clicks": {"store": path, "user": "user", "last": _LAST}}
    listed = _table(folder / "lists.parquet", clicks="ids")
    late = _table(folder / "rows.parquet", history)
    written, read = (_bytes(late) + path.stat().st_size) / _bytes(listed)
    seconds = in_turn(lambda _: _read(listed), lambda _: _read(late), [None], turns)
    cpu = [second / first for first, second in seconds]
    return {"bytes_written": written, "bytes_read": read, "cpu_seconds": cpu}


def _table(path: Path, histories: Mapping[str, Any] | None = None, **lists: str) -> Table:
    columns = {"user": "id", "visit": "session", "item": "id", "click": "label", **lists}
    options = {
        "columns": {**columns, "ts": {"as": "time", "unit": "s"}},
        "histories": histories or {},
        "cache": path.parent,
        "prefetch": 0,
    }
    table = Table(Table.Options.model_validate({"path": path, **options}))
    table.prepare()
    return table


def _bytes(table: Table) -> NDArray[np.int64]:
    """Return the bytes of an import, and of the columns in it that training reads."""
    (imported,) = table._imported("train").folder.glob("train/*")
    used = {*table.schema().sparse, "click", *(["_time"] if table.options.histories else [])}
    metadata = pq.read_metadata(imported)
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = [group.column(n) for group in groups for n in range(group.num_columns)]
    read = sum(e.total_compressed_size for e in chunks if e.path_in_schema.split(".")[0] in used)
    return np.array([imported.stat().st_size, read])


def _read(table: Table) -> None:
    converter = PartialIkjtConverter(PartialIkjtConverter.Options(features=["clicks"]))
    for rows in table.reader(rank=0, world_size=1, batch_size=_BATCH, split="train"):
        converter.convert(rows, table.schema())


def sessions(users: int) -> tuple[pa.Table, pa.Table]:
    """Return rows of visits, and the events before and during the visits."""
    draw, rows = np.random.default_rng(0), _VISITS * _ROWS

    def items(num: int) -> NDArray[np.uint64]:
        return mixed(np.exp(np.log(_ITEMS) * draw.random(num)).astype(np.int64)) >> np.uint64(1)

    number = np.arange(users * rows)
    ts = _START + number % rows * 10 + number % rows // _ROWS * 10_000
    columns = {"user": number // rows, "visit": number // _ROWS, "ts": ts}
    click = draw.random(len(number)) < _CHANGE
    table = pa.table({**columns, "item": items(len(number)), "click": click.astype(np.int8)})
    earlier = np.arange(users * _LAST)
    before = {"user": earlier // _LAST, "ts": _START - _LAST + earlier % _LAST}
    clicked = table.filter(pa.array(click)).select(["user", "ts", "item"])
    return table, pa.concat_tables([pa.table({**before, "item": items(len(earlier))}), clicked])
