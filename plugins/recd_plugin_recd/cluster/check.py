"""``recd cluster --check``: is each session in one piece, with its rows in the order of time?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recd_plugin_recd.cluster.job import check_columns
from recd_plugin_recd.sessions import check_keys, row_place, session_hashes
from recd_plugin_recd.source import Partition, SessionTable, open_source
from recd_plugins.api import DataError


def check_clustered(
    path: Path, session: str | None, timestamp: str | None, plugins_dir: Path | None
) -> dict[str, int]:
    """Read sessions and times of a table; memory grows with the sessions of a partition.

    Returns:
        ``rows`` and ``sessions``, each session counted once in each partition.
    """
    source = open_source(path, session=session, timestamp=timestamp, plugins_dir=plugins_dir)
    check_columns(source)
    counts = [_check(source, partition) for partition in source.partitions]
    rows, sessions = (sum(each) for each in zip(*counts, strict=True))
    return {"rows": rows, "sessions": sessions}


def _check(source: SessionTable, partition: Partition) -> tuple[int, int]:
    keys = source.keys
    seen: set[int] = set()
    last: int | None = None
    last_time: Any = None
    num_rows = 0
    for rows in source.read(partition, [keys.session, keys.timestamp]):
        check_keys(rows, keys)
        if not len(rows):
            continue
        hashes = session_hashes(rows.data.column(keys.session))
        times = rows.data.column(keys.timestamp).to_numpy(zero_copy_only=False)
        starts = np.concatenate([[int(hashes[0]) != last], hashes[1:] != hashes[:-1]])
        earlier = times[1:] < times[:-1]
        backwards = np.concatenate([[last_time is not None and times[0] < last_time], earlier])
        for row in np.flatnonzero(starts | backwards).tolist():
            if not starts[row]:
                raise DataError(
                    f"{row_place(rows, row)}: the time is before that of the row above, of "
                    "the same session; sort the table by recd cluster"
                )
            if int(hashes[row]) in seen:
                raise DataError(
                    f"{row_place(rows, row)}: its session was there before, and other sessions "
                    "between; sort the table by recd cluster"
                )
            seen.add(int(hashes[row]))
        last, last_time = int(hashes[-1]), times[-1]
        num_rows += len(rows)
    return num_rows, len(seen)
