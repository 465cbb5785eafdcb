"""Whether a table is clustered: each session in one piece, its rows in the order of time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recd_plugin_recd.cluster.downsample import hash_sessions
from recd_plugin_recd.cluster.keys import check_columns, check_values, time_numbers
from recd_plugin_recd.source import Partition, SessionTable, open_source
from recd_plugins.api import DataError, Rows


@dataclass(frozen=True)
class Clustered:
    """A table that is: its rows, and its sessions, each counted once in each partition."""

    rows: int
    sessions: int

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def check_clustered(
    path: Path, session: str | None, timestamp: str | None, plugins_dir: Path | None
) -> Clustered:
    """Read sessions and times of a table.

    Memory is 16 bytes for each session of a partition.

    Raises:
        DataError: it is not clustered; the message says the file and row where that shows first.
    """
    source = open_source(path, session=session, timestamp=timestamp, plugins_dir=plugins_dir)
    check_columns(source)
    rows = sessions = 0
    for partition in source.partitions:
        order = _check(source, partition)
        rows += order.rows
        sessions += order.sessions
    return Clustered(rows, sessions)


def _check(source: SessionTable, partition: Partition) -> _Runs:
    runs = _Runs()
    keys = source.keys
    for rows in source.read(partition, [keys.session, keys.timestamp]):
        check_values(rows, keys)
        if len(rows):
            runs.add(rows, rows.data.column(keys.session), rows.data.column(keys.timestamp))
    runs.check_repeats()
    return runs


class _Runs:
    """Sessions one after the other, as hashes: of integers different ones have different hashes."""

    def __init__(self) -> None:
        self.rows = self.sessions = 0
        self._hashes: list[NDArray[np.uint64]] = []
        self._starts: list[NDArray[np.int64]] = []
        self._batches: list[tuple[int, Rows]] = []
        self._checked = 1 << 16
        self._last: tuple[NDArray[np.uint64], NDArray[Any]] | None = None

    def add(self, rows: Rows, sessions: Any, times: Any) -> None:
        """The next rows, at least one.

        Raises:
            DataError: they go back in time, or to an earlier session.
        """
        hashes, moments = hash_sessions(sessions, 0), time_numbers(times)
        self._batches.append((self.rows, Rows(rows.data.slice(0, 0), rows.origins)))
        if self._last is None:
            before, earlier = ~hashes[:1], moments[:1]
        else:
            before, earlier = self._last
        changes = hashes != np.concatenate([before, hashes[:-1]])
        backwards = ~changes & (moments < np.concatenate([earlier, moments[:-1]]))
        self._hashes.append(hashes[changes])
        self._starts.append(np.flatnonzero(changes) + self.rows)
        self.sessions += int(changes.sum())
        if backwards.any():
            row = int(backwards.argmax())
            self.check_repeats(self.rows + row)
            raise DataError(
                f"{self._place(self.rows + row)}: the time is before that of the row above, of the "
                f"same session {sessions[row].as_py()!r}; sort the table by recd cluster"
            )
        self.rows += len(rows)
        self._last = hashes[-1:], moments[-1:]
        if self.sessions > 2 * self._checked:
            self.check_repeats()
            self._checked = self.sessions

    def check_repeats(self, before: int | None = None) -> None:
        """Refuse a session that comes again after another one, before row ``before``.

        Raises:
            DataError: with the place where it comes again.
        """
        if not self._hashes:
            return
        hashes, starts = np.concatenate(self._hashes), np.concatenate(self._starts)
        order = np.argsort(hashes, kind="stable")
        again = np.flatnonzero(hashes[order][1:] == hashes[order][:-1]) + 1
        if len(again) and (before is None or starts[order[again]].min() < before):
            row = int(starts[order[again]].min())
            raise DataError(
                f"{self._place(row)}: its session was there before, and other sessions between; "
                "sort the table by recd cluster"
            )

    def _place(self, row: int) -> str:
        starts = [start for start, _ in self._batches]
        start, rows = self._batches[int(np.searchsorted(starts, row, "right")) - 1]
        path, number = rows.origin_of(row - start)
        return f"{path}: row {number} (from 0)"
