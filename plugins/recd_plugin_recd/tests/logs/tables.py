from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from recd_plugin_recd.logs.log import Consumer, Damage, LogSettings, LogWriter

SCHEMA = pa.schema(
    [
        ("session_id", pa.int64()),
        ("row", pa.int32()),
        ("score", pa.float32()),
        ("items", pa.list_(pa.int64())),
    ]
)


def rows(count: int, seed: int = 0, sessions: int = 40) -> pa.RecordBatch:
    random = np.random.default_rng(seed)
    ids = random.integers(0, sessions, count)
    # A session's list has its id throughout: a row put together from two would show.
    lists = [[int(id)] * int(random.integers(0, 9)) for id in ids]
    scores = random.random(count, np.float32)
    return pa.record_batch([ids, np.arange(count, dtype=np.int32), scores, lists], schema=SCHEMA)


def by_row(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(list(batches), SCHEMA).sort_by("row").combine_chunks()


def write(folder: Path, *batches: pa.RecordBatch, **settings) -> LogWriter:
    with LogWriter(folder, batches[0].schema, LogSettings(**settings)) as log:
        for batch in batches:
            log.write(batch)
    return log


def read(folder: Path, offsets: Path | None = None) -> tuple[list[pa.RecordBatch], list[Damage]]:
    found: list[Damage] = []
    consumer = Consumer(folder, offsets, found.append)
    batches = list(consumer)
    if offsets is not None:
        consumer.commit()
    return batches, found
