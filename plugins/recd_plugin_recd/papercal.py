"""PAPERCAL: generates a table with the duplication that the RecD paper measured (section 3).

Session lengths are lognormal, with a mean of 16.5 and a maximum beyond 1000 rows. A session lasts
an hour. At any time, the overlapping sessions have a million rows in total. A user feature has the
same list in the next row of the session with probability 0.84 to 0.91. 30 % of the changes replace
the list. Other changes append an id and drop the oldest one. By bytes, 81.5 % of the lists are
exact duplicates, and 89.7 % are partial duplicates.

``rm1``, ``rm2`` and ``rm3`` have the features of the models in section 6.1: groups of sequence
features that change together, and about 100 features that are pooled element-wise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numba as nb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
NUM_ITEMS = 8


@dataclass(frozen=True)
class Feature:
    """A sparse feature of the generated table.

    Attributes:
        name: name of the column.
        mean_length: mean number of ids per row.
        keep: probability that the next row of a session has the same list.
        clock: number of the clock. Features with the same clock change in the same rows.
        num_ids: number of different ids.
    """

    name: str
    mean_length: int
    keep: float
    clock: int
    num_ids: int


@dataclass(frozen=True)
class TableColumns:
    """Sparse features and number of dense columns of a generated table.

    A clock determines in which rows a list changes. Clocks are numbered in the order of features.
    """

    features: tuple[Feature, ...]
    num_dense: int

    @cached_property
    def keep(self) -> NDArray[np.float64]:
        """Return the probability that a list stays, for each clock, float64 ``[clocks]``."""
        return np.array(list({feature.clock: feature.keep for feature in self.features}.values()))

    @property
    def num_session_dense(self) -> int:
        """Return the number of dense columns that are constant within a session."""
        return (self.num_dense + 1) // 2

    @cached_property
    def schema(self) -> pa.Schema:
        """Return the pyarrow schema of the table."""
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
    """Numbers of features of rm1, rm2 or rm3.

    Attributes:
        groups: number of sequence features in each group that changes together.
        group_keeps: ``Feature.keep`` of each group.
        num_users: number of user features outside these groups.
        least_user_keep: smallest ``Feature.keep`` of these user features; the largest is 0.07 more.
        num_dense: number of dense columns.
    """

    groups: tuple[int, ...]
    group_keeps: tuple[float, ...]
    num_users: int
    least_user_keep: float
    num_dense: int


# ``keep`` is chosen so that lists repeat 5.4 times on average, as in the paper.
_SIZES: dict[str, _Sizes] = {
    "papercal": _Sizes((3, 3, 3), (0.872, 0.842, 0.892), 23, 0.842, 13),
    "rm1": _Sizes((4, 3, 3, 3, 3), (0.872, 0.842, 0.892, 0.857, 0.877), 92, 0.836, 64),
    "rm2": _Sizes((6,), (0.868,), 92, 0.836, 64),
    "rm3": _Sizes((11,), (0.868,), 92, 0.836, 64),
}
_SEQUENCE_LENGTHS = (100, 60, 150)


def shape_of(name: str, scale: float = 1.0) -> TableColumns:
    """Return the columns of papercal, rm1, rm2 or rm3. A smaller scale has shorter lists."""
    sizes = _SIZES[name]

    def length(mean: float) -> int:
        return max(1, round(mean * length_scale(scale)))

    means = _SEQUENCE_LENGTHS
    sequences = [
        Feature(f"seq_{group}_{i}", length(means[i % len(means)]), keep, group, 2_000_000)
        for group, (count, keep) in enumerate(zip(sizes.groups, sizes.group_keeps, strict=True))
        for i in range(count)
    ]
    # Lengths from 10 to 60. ``keep`` is shuffled so that it does not correlate with length.
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
    """Return the factor for list lengths: the fourth root of ``scale``.

    With this factor, pooling takes about the same fraction of compute at all scales.
    """
    return float(scale**0.25)


# Increased when the same options would generate different rows.
VERSION = 1

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
    """Session, position in the session, and time in microseconds of rows, int64 ``[rows]``."""

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


def row_keys(rows: int, seed: int, layout: str) -> Iterator[RowKeys]:
    """Yield the session, position and time of ``rows`` rows, in blocks of any size.

    ``layout`` is ``clustered`` (sorted by session), ``interleaved`` (the same rows sorted by time)
    or ``stream`` (sorted by time, starting after an hour, when many sessions overlap).
    """
    if layout == "clustered":
        return _first(rows, _sessions(seed))
    if layout == "interleaved":
        return _by_time(_first(rows, _sessions(seed)))
    return _first(rows, _after(_EPOCH + _HOUR, _by_time(_sessions(seed))))


def make_rows(keys: RowKeys, shape: TableColumns = PAPERCAL) -> pa.RecordBatch:
    """Generate all columns of the rows with these keys."""
    sessions = keys.sessions
    versions = list_versions(sessions, keys.positions, shape.keep, REPLACE_SHARE)
    lists = {}
    for number, feature in enumerate(shape.features):
        offsets = list_offsets(sessions, feature.clock, feature.mean_length)
        values = list_values(sessions, versions[feature.clock], offsets, number, feature.num_ids)
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
    """Rearrange blocks of any size into blocks of ``size`` rows. The last may be shorter."""
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
    """Return the start time of the first session in a block of sessions."""
    return _EPOCH + round(block * _SESSIONS_A_BLOCK * _HOUR * MEAN_SESSION / ROWS_IN_FLIGHT)


def _sessions(seed: int) -> Iterator[RowKeys]:
    """Yield endless blocks of sessions, sorted by start time."""
    for block in count():
        sessions = session_keys(seed, block * _SESSIONS_A_BLOCK, _SESSIONS_A_BLOCK)
        lengths = session_lengths(sessions, MEAN_SESSION, SESSION_SIGMA, LONGEST_SESSION)
        starts = np.linspace(
            _block_start(block), _block_start(block + 1), _SESSIONS_A_BLOCK, endpoint=False
        ).astype(np.int64)
        ends = np.cumsum(lengths)
        yield RowKeys(
            np.repeat(sessions, lengths),
            np.arange(ends[-1]) - np.repeat(ends - lengths, lengths),
            row_times(sessions, lengths, starts, _HOUR),
        )


def _by_time(blocks: Iterator[RowKeys]) -> Iterator[RowKeys]:
    """Merge the rows of overlapping sessions into blocks sorted by time."""
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
    same_for_session = number < num_session
    positions = np.zeros_like(keys.positions) if same_for_session else keys.positions
    uniform = uniforms(keys.sessions, positions, number)
    return (np.log1p(5000 * uniform) if same_for_session else uniform).astype(np.float32)


def _labels(
    keys: RowKeys,
    lists: dict[str, tuple[np.ndarray, Int64s]],
    dense: list[np.ndarray],
    shape: TableColumns,
) -> np.ndarray:
    """Draw labels, int8 ``[rows]``, with probabilities that depend on the features."""
    logit = -1.7 + 0.5 * (dense[0] - 7.5) + 1.5 * (dense[shape.num_session_dense] - 0.5)
    for name, weight in (("item_0", 2.0), ("item_1", 1.5), ("usr_0", 3.0), ("seq_0_0", 6.0)):
        offsets, values = lists[name]
        logit += weight * mean_effects(values, offsets)
    drawn = uniforms(keys.sessions, keys.positions, shape.num_dense)
    return (drawn < 1 / (1 + np.exp(-logit))).astype(np.int8)


# Every random draw is a hash of what it is for (seed, session, position, feature), so that any row
# can be made by itself, in any order, with the same outcome.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TO_UNIT = 1.0 / (1 << 53)
# Replacing a whole list advances its version by more than the longest list length.
REPLACED = 1024


@nb.njit(inline="always")
def mix(value: np.uint64) -> np.uint64:
    """Return the SplitMix64 hash of a 64-bit integer."""
    value = nb.uint64(value) + _GOLDEN
    value = (value ^ (value >> nb.uint64(30))) * nb.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> nb.uint64(27))) * nb.uint64(0x94D049BB133111EB)
    return value ^ (value >> nb.uint64(31))


@nb.njit(inline="always")
def draw(stream: np.uint64, counter: int) -> float:
    """Return a random number in [0, 1) that depends on ``stream`` and ``counter``."""
    return np.float64(mix(stream + nb.uint64(counter) * _GOLDEN) >> nb.uint64(11)) * _TO_UNIT


@nb.njit(cache=True)
def session_keys(seed: int, first: int, count: int) -> Int64s:
    """Return 63-bit ids of ``count`` sessions from number ``first`` on, int64 ``[count]``."""
    stream = mix(nb.uint64(seed))
    keys = np.empty(count, np.int64)
    for i in range(count):
        keys[i] = nb.int64(mix(stream ^ nb.uint64(first + i)) >> nb.uint64(1))
    return keys


@nb.njit(cache=True)
def session_lengths(keys: Int64s, mean: float, sigma: float, longest: int) -> Int64s:
    """Draw lognormal session lengths from 1 to ``longest``, int64 ``[num_sessions]``."""
    lengths = np.empty(len(keys), np.int64)
    mu = math.log(mean) - sigma * sigma / 2
    for i in range(len(keys)):
        stream = mix(nb.uint64(keys[i]) ^ nb.uint64(1))
        radius = math.sqrt(-2.0 * math.log(1.0 - draw(stream, 0)))
        normal = radius * math.cos(2.0 * math.pi * draw(stream, 1))
        lengths[i] = min(longest, max(1, round(math.exp(mu + sigma * normal))))
    return lengths


@nb.njit(cache=True)
def row_times(keys: Int64s, lengths: Int64s, starts: Int64s, duration: int) -> Int64s:
    """Draw the times of all rows, ascending in each session, int64 ``[lengths.sum()]``."""
    times = np.empty(lengths.sum(), np.int64)
    row = 0
    for i in range(len(keys)):
        stream = mix(nb.uint64(keys[i]) ^ nb.uint64(2))
        for position in range(lengths[i]):
            times[row + position] = starts[i] + np.int64(draw(stream, position) * duration)
        times[row : row + lengths[i]].sort()
        row += lengths[i]
    return times


@nb.njit(cache=True)
def list_versions(
    keys: Int64s, positions: Int64s, keep: NDArray[np.float64], replace: float
) -> NDArray[np.int64]:
    """Return version numbers of list features, int64 ``[clocks, rows]``; equal means equal lists.

    A clock is a set of features that change in the same rows. ``keys`` are the sessions of the
    rows, and ``positions`` their places in the session. From one position to the next, a version
    stays with probability ``keep[clock]``. Otherwise, it grows by REPLACED (a new list) with
    probability ``replace``, or by 1 (one new id).
    """
    versions = np.empty((len(keep), len(keys)), np.int64)
    for clock in range(len(keep)):
        salt = mix(nb.uint64(clock + 1000))
        for row in range(len(keys)):
            version, first = 0, 1
            if row and keys[row] == keys[row - 1] and positions[row] > positions[row - 1]:
                version, first = versions[clock, row - 1], positions[row - 1] + 1
            stream = mix(nb.uint64(keys[row]) ^ salt)
            for position in range(first, positions[row] + 1):
                if draw(stream, 2 * position) >= keep[clock]:
                    version += REPLACED if draw(stream, 2 * position + 1) < replace else 1
            versions[clock, row] = version
    return versions


@nb.njit(cache=True)
def list_offsets(keys: Int64s, clock: int, mean_length: int) -> NDArray[np.int32]:
    """Return the offsets of a feature's lists, int32 ``[rows + 1]``.

    All lists of a session have the same length, which is uniform in 0.5 to 1.5 times the mean.
    """
    offsets = np.zeros(len(keys) + 1, np.int32)
    salt = mix(nb.uint64(clock + 2000))
    for row in range(len(keys)):
        length = 1
        if mean_length > 1:
            length = max(1, round(mean_length * (0.5 + draw(nb.uint64(keys[row]) ^ salt, 0))))
        offsets[row + 1] = offsets[row] + length
    return offsets


@nb.njit(cache=True)
def list_values(
    keys: Int64s, versions: Int64s, offsets: NDArray[np.int32], feature: int, num_ids: int
) -> Int64s:
    """Return the ids of a feature's lists, int64 ``[offsets[-1]]``.

    A session has one endless sequence of ids. The list of version v starts at element v of it.
    Ids have a Zipf distribution over ``num_ids`` ids, and are hashed to 63 bits.
    """
    values = np.empty(offsets[-1], np.int64)
    salt = mix(nb.uint64(feature + 3000))
    log_num_ids = math.log(num_ids)
    for row in range(len(keys)):
        start, length = offsets[row], offsets[row + 1] - offsets[row]
        made = 0
        if row and keys[row] == keys[row - 1]:
            step = versions[row] - versions[row - 1]
            for j in range(step, length):
                values[start + made] = values[offsets[row - 1] + j]
                made += 1
        stream = mix(nb.uint64(keys[row]) ^ salt)
        for j in range(made, length):
            rank = np.uint64(math.exp(log_num_ids * draw(stream, versions[row] + j)))
            values[start + j] = nb.int64(mix(rank ^ salt) >> nb.uint64(1))
    return values


@nb.njit(cache=True)
def uniforms(keys: Int64s, positions: Int64s, purpose: int) -> NDArray[np.float64]:
    """Draw a number in [0, 1) for each row, float64 ``[rows]``. ``purpose`` acts as a seed."""
    out = np.empty(len(keys), np.float64)
    salt = mix(nb.uint64(purpose + 4000))
    for row in range(len(keys)):
        out[row] = draw(mix(nb.uint64(keys[row]) ^ salt), positions[row])
    return out


@nb.njit(cache=True)
def mean_effects(values: Int64s, offsets: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the mean effect on the label of the ids in each row, in [-1, 1), float64 ``[rows]``.

    The effect of an id is a fixed random number.
    """
    out = np.zeros(len(offsets) - 1, np.float64)
    for row in range(len(out)):
        for j in range(offsets[row], offsets[row + 1]):
            out[row] += 2.0 * draw(nb.uint64(values[j]), 7) - 1.0
        out[row] /= max(1, offsets[row + 1] - offsets[row])
    return out
