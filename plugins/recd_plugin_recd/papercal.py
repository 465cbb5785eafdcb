"""PAPERCAL: a generated table with the duplication that the RecD paper measured (section 3).

Sessions are lognormal with a mean of 16.5 rows and a tail beyond 1000. Each session's rows are
spread over an hour, and sessions start as a steady stream, so that a million rows are in flight.
A user feature keeps its list from row to row of a session with probability 0.84-0.91; 30 % of the
updates replace the whole list, the others append one id and drop the oldest. By bytes, 81.5 % of
the lists are exact duplicates and 89.7 % partial ones.

``rm1``, ``rm2`` and ``rm3`` have the features of the models of the paper's section 6.1: sequence
features in groups that change together, and about 100 features that are pooled element-wise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_recd import papercal_kernels as kernels
from recd_plugin_recd.papercal_kernels import Int64s

ShapeName = Literal["papercal", "rm1", "rm2", "rm3"]

NUM_ITEMS = 8


@dataclass(frozen=True)
class Feature:
    """One sparse feature. Features with the same ``clock`` change in the same rows.

    ``keep`` is the probability that a row has the list of the session's previous row.
    """

    name: str
    mean_length: int
    keep: float
    clock: int
    num_ids: int


@dataclass(frozen=True)
class TableColumns:
    """The columns of a generated table besides session, time and label.

    Attributes:
        features: lists of ids; the clocks are numbered from 0 in the order of the features.
        num_dense: ``dense_0`` and so on.
    """

    features: tuple[Feature, ...]
    num_dense: int

    @cached_property
    def keep(self) -> NDArray[np.float64]:
        """The probability that the clock stands still, by clock."""
        return np.array(list({feature.clock: feature.keep for feature in self.features}.values()))

    @property
    def num_session_dense(self) -> int:
        """The first so many dense features are the same in all rows of a session."""
        return (self.num_dense + 1) // 2

    @cached_property
    def schema(self) -> pa.Schema:
        """All columns of the table."""
        return pa.schema(
            [
                ("session_id", pa.int64()),
                ("ts", pa.int64()),
                ("label", pa.int8()),
                *((f"dense_{i}", pa.float32()) for i in range(self.num_dense)),
                *((feature.name, pa.list_(pa.int64())) for feature in self.features),
            ]
        )


@dataclass(frozen=True)
class _Sizes:
    """What differs between shapes.

    Attributes:
        groups: sequence features of each group.
        group_keeps: their ``keep``, by group.
        num_users: other features of the user.
        least_user_keep: of the first; the others have up to 0.07 more.
    """

    groups: tuple[int, ...]
    group_keeps: tuple[float, ...]
    num_users: int
    least_user_keep: float
    num_dense: int


# `keep` is such that the lists of each shape stand 5.4 times, as the paper's do.
_SIZES: dict[ShapeName, _Sizes] = {
    "papercal": _Sizes((3, 3, 3), (0.872, 0.842, 0.892), 23, 0.842, 13),
    "rm1": _Sizes((4, 3, 3, 3, 3), (0.872, 0.842, 0.892, 0.857, 0.877), 92, 0.836, 64),
    "rm2": _Sizes((6,), (0.868,), 92, 0.836, 64),
    "rm3": _Sizes((11,), (0.868,), 92, 0.836, 64),
}
_SEQUENCE_LENGTHS = (100, 60, 150)


def shape_of(name: ShapeName, scale: float = 1.0) -> TableColumns:
    """A shape by its name.

    Args:
        name: its name.
        scale: shortens the lists of ``rm1``, ``rm2`` and ``rm3`` to ``length_scale(scale)``.
    """
    sizes = _SIZES[name]

    def length(mean: float) -> int:
        return max(1, round(mean * length_scale(scale)))

    sequences = [
        Feature(
            f"seq_{group}_{i}",
            length(_SEQUENCE_LENGTHS[i % len(_SEQUENCE_LENGTHS)]),
            keep,
            group,
            2_000_000,
        )
        for group, (count, keep) in enumerate(zip(sizes.groups, sizes.group_keeps, strict=True))
        for i in range(count)
    ]
    # Lengths from 10 to 60; the order of `keep` is scrambled, so that it does not follow length.
    last = sizes.num_users - 1
    users = [
        Feature(
            f"usr_{i}",
            length(10 * 6 ** (i / last)),
            sizes.least_user_keep + 0.07 * (i * 7 % sizes.num_users) / last,
            len(sizes.groups) + i,
            1_000_000,
        )
        for i in range(sizes.num_users)
    ]
    item_clock = len(sizes.groups) + sizes.num_users
    items = [Feature(f"item_{i}", 1, 0.05, item_clock, 1_000_000) for i in range(NUM_ITEMS)]
    return TableColumns((*sequences, *users, *items), sizes.num_dense)


def length_scale(scale: float) -> float:
    """The fourth root: lists shrink less than widths, or little would be left of their share.

    The work that repeats, pooling and lookups, grows with length and width; the interaction, whose
    number of features stays, with width alone.
    """
    return float(scale**0.25)


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
