"""PAPERCAL: a generated table with the duplication that the RecD paper measured (section 3).

Sessions are lognormal with a mean of 16.5 rows and a tail beyond 1000. Each session's rows are
spread over an hour, and sessions start as a steady stream, so that a million rows are in flight.
A user feature keeps its list from row to row of a session with probability 0.84-0.91; 30 % of the
updates replace the whole list, the others append one id and drop the oldest. By bytes, 81.5 % of
the lists are exact duplicates and 89.7 % partial ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np
import pyarrow as pa

from recd_plugin_recd import papercal_kernels as kernels
from recd_plugin_recd.papercal_kernels import Int64s
from recd_plugin_recd.papercal_shapes import TableColumns, shape_of

# Raised when the same options would give other rows.
VERSION = 1

Layout = Literal["clustered", "interleaved", "stream"]

MEAN_SESSION = 16.5
SESSION_SIGMA = 1.3
LONGEST_SESSION = 3000
ROWS_IN_FLIGHT = 1_000_000
REPLACE_SHARE = 0.30

_HOUR = 3_600_000_000
_EPOCH = 1_704_067_200_000_000
_SESSIONS_A_BLOCK = 2048


PAPERCAL = shape_of("papercal")
FEATURES = PAPERCAL.features
KEEP = PAPERCAL.keep
NUM_DENSE = PAPERCAL.num_dense
SCHEMA = PAPERCAL.schema


@dataclass(frozen=True)
class RowKeys:
    """Which rows: session, position in it and time in microseconds, each int64 ``[rows]``."""

    sessions: Int64s
    positions: Int64s
    times: Int64s

    def __len__(self) -> int:
        return len(self.sessions)

    def __getitem__(self, index: slice | Int64s | np.ndarray) -> RowKeys:
        return RowKeys(self.sessions[index], self.positions[index], self.times[index])

    @staticmethod
    def concat(parts: list[RowKeys]) -> RowKeys:
        return RowKeys(
            np.concatenate([part.sessions for part in parts]),
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.times for part in parts]),
        )


def row_keys(rows: int, seed: int, layout: Layout) -> Iterator[RowKeys]:
    """The keys of a table of exactly ``rows`` rows, in its order, in blocks of any size.

    ``clustered`` and ``interleaved`` hold the same rows, whole sessions but for the last, by
    session or by time. ``stream`` is a cut of ``rows`` rows out of the steady stream, by time: the
    sessions in it began earlier and end later.
    """
    if layout == "clustered":
        return _first(rows, _sessions(seed))
    if layout == "interleaved":
        return _by_time(_first(rows, _sessions(seed)))
    return _first(rows, _after(_EPOCH + _HOUR, _by_time(_sessions(seed))))


def make_rows(keys: RowKeys, shape: TableColumns = PAPERCAL) -> pa.RecordBatch:
    """All columns of the rows named by ``keys``."""
    sessions = keys.sessions
    versions = kernels.list_versions(sessions, keys.positions, shape.keep, REPLACE_SHARE)
    lists = {}
    for number, feature in enumerate(shape.features):
        offsets = kernels.list_offsets(sessions, feature.clock, feature.mean_length)
        values = kernels.list_values(
            sessions, versions[feature.clock], offsets, number, feature.num_ids
        )
        lists[feature.name] = (offsets, values)
    dense = [_dense(keys, i, shape.num_session_dense) for i in range(shape.num_dense)]
    columns = [
        sessions,
        keys.times,
        _labels(keys, lists, dense, shape),
        *dense,
        *(pa.ListArray.from_arrays(offsets, values) for offsets, values in lists.values()),
    ]
    return pa.record_batch(columns, schema=shape.schema)


def chunks(keys: Iterator[RowKeys], size: int) -> Iterator[RowKeys]:
    """The same rows in blocks of ``size``, the last one shorter."""
    waiting: list[RowKeys] = []
    for block in keys:
        waiting.append(block)
        if sum(map(len, waiting)) >= size:
            joined = RowKeys.concat(waiting)
            whole = len(joined) - len(joined) % size
            yield from (joined[start : start + size] for start in range(0, whole, size))
            waiting = [joined[whole:]]
    if sum(map(len, waiting)):
        yield RowKeys.concat(waiting)


def _block_start(block: int) -> int:
    """The time at which the first session of a block of sessions starts."""
    return _EPOCH + round(block * _SESSIONS_A_BLOCK * _HOUR * MEAN_SESSION / ROWS_IN_FLIGHT)


def _sessions(seed: int) -> Iterator[RowKeys]:
    """All rows of the endless stream of sessions, by session in the order of their starts."""
    for block in count():
        sessions = kernels.session_keys(seed, block * _SESSIONS_A_BLOCK, _SESSIONS_A_BLOCK)
        lengths = kernels.session_lengths(sessions, MEAN_SESSION, SESSION_SIGMA, LONGEST_SESSION)
        starts = np.linspace(
            _block_start(block), _block_start(block + 1), _SESSIONS_A_BLOCK, endpoint=False
        ).astype(np.int64)
        ends = np.cumsum(lengths)
        yield RowKeys(
            np.repeat(sessions, lengths),
            np.arange(ends[-1]) - np.repeat(ends - lengths, lengths),
            kernels.row_times(sessions, lengths, starts, _HOUR),
        )


def _by_time(blocks: Iterator[RowKeys]) -> Iterator[RowKeys]:
    """Merge sessions by time. What is held is the rows in flight, however many sessions come."""
    waiting = next(blocks)
    for number, block in enumerate(blocks, 1):
        done = waiting.times < _block_start(number)
        yield _sorted(waiting[done])
        waiting = RowKeys.concat([waiting[~done], block])
    yield _sorted(waiting)


def _sorted(keys: RowKeys) -> RowKeys:
    return keys[np.argsort(keys.times, kind="stable")]


def _first(rows: int, blocks: Iterator[RowKeys]) -> Iterator[RowKeys]:
    for block in blocks:
        yield block[:rows]
        rows -= len(block)
        if rows <= 0:
            return


def _after(time: int, blocks: Iterator[RowKeys]) -> Iterator[RowKeys]:
    for block in blocks:
        yield block[block.times >= time]


def _dense(keys: RowKeys, number: int, num_session: int) -> np.ndarray:
    """float32 ``[rows]``: the first are log counts of the session, the others vary by row."""
    same_for_session = number < num_session
    positions = np.zeros_like(keys.positions) if same_for_session else keys.positions
    uniform = kernels.uniforms(keys.sessions, positions, number)
    return (np.log1p(5000 * uniform) if same_for_session else uniform).astype(np.float32)


def _labels(
    keys: RowKeys,
    lists: dict[str, tuple[np.ndarray, Int64s]],
    dense: list[np.ndarray],
    shape: TableColumns,
) -> np.ndarray:
    """int8 ``[rows]``, 1 with odds that follow dense features and hidden effects of ids."""
    logit = -1.7 + 0.5 * (dense[0] - 7.5) + 1.5 * (dense[shape.num_session_dense] - 0.5)
    for name, weight in (("item_0", 2.0), ("item_1", 1.5), ("usr_0", 3.0), ("seq_0_0", 6.0)):
        offsets, values = lists[name]
        logit += weight * kernels.mean_effects(values, offsets)
    drawn = kernels.uniforms(keys.sessions, keys.positions, shape.num_dense)
    return (drawn < 1 / (1 + np.exp(-logit))).astype(np.int8)
