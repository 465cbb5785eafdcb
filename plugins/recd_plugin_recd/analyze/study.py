"""Measures how often the id lists of a table repeat (RecD, section 3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugin_recd.sessions import Nulls, SessionTable, session_hashes, without_nulls
from recd_plugins.api import DataError, Rows, arrow, column_statistics, data_profiles, dedup

#: Default batch size.
_BATCH_SIZE = 4096
#: Minimum number of sessions in a sample for a recommendation.
MIN_SESSIONS = 32
#: Minimum DedupeFactor for which deduplicating a feature pays off (RecD, section 4.3).
MIN_FACTOR = 1.5
#: Minimum ratio of the partial to the exact DedupeFactor for partial deduplication to pay off.
MIN_GAIN = 1.2
_VERSION = 3
_ALL_HASHES = 1 << 64
#: Runs to buffer before grouping them by session, and batches to buffer before joining them.
_MAX_RUNS, _MAX_BATCHES = 1 << 18, 64

Form = Literal["plain", "exact", "partial"]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class FeatureReport:
    """Duplication of one feature. A DedupeFactor is ids divided by ids in unique rows.

    Attributes:
        name: name of the feature's column.
        length: mean number of ids per row (l in the RecD paper).
        stays: probability that the next row of a session has the same list (d in the paper).
        exact: fraction of ids in lists that equal the list of the session's previous row.
        partial: fraction of ids that also occur in the list of the session's previous row.
        factor_as_is: DedupeFactor of batches in the current row order.
        factor_by_session: DedupeFactor of batches after sorting the rows by session.
        partial_factor: DedupeFactor of partial deduplication after sorting by session.
        form: recommended storage after sorting by session, ``plain``, ``exact`` or ``partial``;
            None if the sample is too small.
    """

    name: str
    length: float
    stays: float
    exact: float
    partial: float
    factor_as_is: float
    factor_by_session: float
    partial_factor: float
    form: Form | None


@dataclass(frozen=True)
class SessionSummary:
    """Session statistics of a table. Each partition counts its sessions separately.

    Attributes:
        count: number of sessions.
        samples_per_session: mean number of rows per session (S in the RecD paper).
        median, longest: median and maximum number of rows per session.
        torn: fraction of sessions whose rows are not adjacent.
    """

    count: int
    samples_per_session: float
    median: int
    longest: int
    torn: float


@dataclass(frozen=True)
class SampleReport:
    """Size of the sample of rows that was sorted by session."""

    rows: int
    sessions: int
    megabytes: int


@dataclass(frozen=True)
class TableAnalysis:
    """The report of ``recd analyze``. A DedupeFactor is ids divided by ids in unique rows.

    Attributes:
        path: path of the table or registry file.
        rows: number of rows of the table.
        partitions: number of partitions, 1 if the table is not partitioned.
        batch_size: number of rows in a batch.
        sessions: session statistics of the table.
        samples_per_batch_session: mean number of rows per session within a batch.
        exact, partial: fractions of ids that repeat, as in ``FeatureReport``, over all features.
        factor_as_is: DedupeFactor of batches in the current row order, over all features.
        factor_by_session, partial_factor: exact and partial DedupeFactor after sorting by session.
        features: reports of all features, in table order.
        sample: size of the sorted sample; None if the table is already sorted by session.
        converter: text of a ``converter:`` section for registry.yaml; None if the sample is too
            small.
    """

    path: str
    rows: int
    partitions: int
    batch_size: int
    sessions: SessionSummary
    samples_per_batch_session: float
    exact: float
    partial: float
    factor_as_is: float
    factor_by_session: float
    partial_factor: float
    features: tuple[FeatureReport, ...]
    sample: SampleReport | None
    converter: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"version": _VERSION, **asdict(self)}


def study(
    source: SessionTable,
    *,
    batch_size: int | None = None,
    sample_megabytes: int,
    nulls: Nulls = "error",
    progress: Callable[[int], None] = lambda _rows: None,
) -> TableAnalysis:
    """Measure how often the id lists of a table repeat, and return the report.

    Memory use is two batches, about twice the sample, and 24 bytes per session of a partition.

    Args:
        source: the table.
        batch_size: rows per batch; None means the source's batch size, or 4096 if it has none.
        sample_megabytes: maximum size in MB of the sample, which contains whole sessions.
        nulls: ``empty`` reads a null list as an empty list, ``error`` raises DataError.
        progress: called with the number of rows read since the last call.

    Raises:
        DataError: the table has no rows or no feature to measure.
    """
    if not source.features:
        columns = ", ".join(f"{field.name!r} ({field.type})" for field in source.schema)
        raise DataError(
            f"{source.path}: no column contains lists of integers up to int64, so there is nothing "
            f"to analyze. Use a table with such a column; the columns are {columns}."
        )
    keys, names = source.keys, source.features
    size = batch_size or source.batch_size or _BATCH_SIZE
    counts, sample = SessionCounts(), SessionSample(sample_megabytes * 1_000_000)
    meter = BatchMeter(names, size)
    parts: list[data_profiles.TableStatistics] = []
    columns_read = list(dict.fromkeys([*names, keys.session, keys.timestamp]))
    for number, partition in enumerate(source.partitions):
        statistics: column_statistics.StatisticsAccumulator | None = None
        for rows in source.read(partition, columns_read):
            lists = _as_lists(rows, source, nulls)
            hashes = session_hashes(column_statistics.session_column(rows, keys.session), number)
            statistics = statistics or column_statistics.StatisticsAccumulator(
                lists.schema, keys, names
            )
            statistics.add(Rows(lists, rows.origins))
            counts.add(hashes)
            meter.add(lists, hashes)
            sample.add(lists, hashes)
            progress(len(rows))
        counts.end_partition()
        if statistics is not None:
            parts.append(statistics.result())
    if not parts or not sum(part.rows for part in parts):
        raise DataError(f"{source.path}: the table has no rows. Use another table.")
    stored, sessions = data_profiles.TableStatistics.merge(parts), counts.result()
    meter.finish()
    # A clustered table is measured directly. Otherwise the sample shows the effect of clustering.
    known, by_session, sampled = stored, meter, None
    if sessions.torn:
        hashes, batch = sample.by_session(keys.timestamp)
        accumulator = column_statistics.StatisticsAccumulator(batch.schema, keys, names)
        accumulator.add(batch)
        known, by_session = accumulator.result(), BatchMeter(names, size)
        by_session.add(batch, hashes)
        by_session.finish()
        sampled = SampleReport(len(batch), known.sessions, sample_megabytes)
    enough = sampled is None or sampled.rows == stored.rows or sampled.sessions >= MIN_SESSIONS
    features = []
    for name, as_is, exact in zip(names, meter.factors(), by_session.factors(), strict=True):
        feature = known.features[name]
        partial = feature.partial_dedupe_factor
        features.append(
            FeatureReport(
                name=name,
                length=feature.length,
                stays=feature.stays,
                exact=feature.exact_duplication,
                partial=feature.partial_duplication,
                factor_as_is=as_is,
                factor_by_session=exact,
                partial_factor=partial,
                form=choose_form(exact, partial) if enough else None,
            )
        )
    return TableAnalysis(
        path=str(source.path),
        rows=stored.rows,
        partitions=len(source.partitions),
        batch_size=size,
        sessions=sessions,
        samples_per_batch_session=meter.rows / meter.sessions,
        exact=known.total.exact_duplication,
        partial=known.total.partial_duplication,
        factor_as_is=meter.total_factor(),
        factor_by_session=by_session.total_factor(),
        partial_factor=known.total.partial_dedupe_factor,
        features=tuple(features),
        sample=sampled,
        converter=_converter_section(features) if enough else None,
    )


def choose_form(exact: float, partial: float) -> Form:
    """Recommend ``plain``, ``exact`` or ``partial`` storage, given the two DedupeFactors."""
    if partial >= MIN_FACTOR and partial >= MIN_GAIN * exact:
        return "partial"
    return "exact" if exact >= MIN_FACTOR else "plain"


def _as_lists(rows: Rows, source: SessionTable, nulls: Nulls) -> pa.RecordBatch:
    """Return all features as list<int64>, and the session and time columns."""
    rows, columns = without_nulls(rows, source.features, nulls), {}
    for name in source.features:
        ids, offsets = arrow.sparse_column(rows, name)
        first, last = int(offsets[0]), int(offsets[-1])
        ends = (offsets - first).astype(np.int32)
        columns[name] = pa.ListArray.from_arrays(ends, ids[first:last])
    for name in (source.keys.session, source.keys.timestamp):
        columns[name] = rows.data[name]
    return pa.record_batch(columns)


def _converter_section(features: Sequence[FeatureReport]) -> str:
    """Return a ``converter:`` section for registry.yaml that stores features as recommended."""
    names = {
        form: [json.dumps(each.name, ensure_ascii=False) for each in features if each.form == form]
        for form in ("partial", "exact")
    }
    exact = f"# exact: {', '.join(names['exact'])}" if names["exact"] else ""
    if names["partial"]:
        listed = "".join(f"      - {name}\n" for name in names["partial"])
        groups = f"    groups: auto {exact}\n" if exact else ""
        return f"converter:\n  use: recd.partial_ikjt\n  options:\n{groups}    features:\n{listed}"
    return f"converter: {{use: recd.ikjt}} {exact}\n" if exact else "converter: {use: recd.kjt}\n"


class SessionCounts:
    """Counts the rows of each session, and the sessions whose rows are not adjacent."""

    def __init__(self) -> None:
        self._runs: list[pa.Table] = []
        self._num_runs = self._num_torn = 0
        self._last: int | None = None
        self._sizes: list[NDArray[np.int64]] = []

    def add(self, hashes: Hashes) -> None:
        """Count the next rows of the table, with their session hashes, uint64 ``[rows]``."""
        if not len(hashes):
            return
        starts = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]])
        runs = np.ones(len(starts), np.int64)
        runs[0] = int(hashes[0]) != self._last
        self._last = int(hashes[-1])
        rows = np.diff(np.r_[starts, len(hashes)])
        self._runs.append(pa.table({"session": hashes[starts], "rows": rows, "runs": runs}))
        self._num_runs += len(starts)
        if self._num_runs > _MAX_RUNS + 2 * len(self._runs[0]):
            self._merge()

    def end_partition(self) -> None:
        """Count the sessions of this partition, and free the memory of their row counts."""
        if self._runs:
            sessions = self._merge()
            self._sizes.append(sessions["rows"].to_numpy())
            self._num_torn += int(np.count_nonzero(sessions["runs"].to_numpy() > 1))
        self._runs, self._num_runs, self._last = [], 0, None

    def result(self) -> SessionSummary:
        """Return the statistics of all partitions. Requires at least one row."""
        sizes = np.concatenate(self._sizes)
        return SessionSummary(
            count=len(sizes),
            samples_per_session=float(sizes.mean()),
            median=int(np.median(sizes)),
            longest=int(sizes.max()),
            torn=self._num_torn / len(sizes),
        )

    def _merge(self) -> pa.Table:
        runs = pa.concat_tables(self._runs)
        merged = runs.group_by("session").aggregate([("rows", "sum"), ("runs", "sum")])
        merged = merged.select(["session", "rows_sum", "runs_sum"]).rename_columns(
            runs.schema.names
        )
        self._runs, self._num_runs = [merged], len(merged)
        return merged


class SessionSample:
    """Collects all rows of the sessions with the lowest hashes, a random sample of sessions.

    The rows take at most ``max_bytes``.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._limit = _ALL_HASHES
        self._held: list[tuple[Hashes, pa.RecordBatch]] = []

    def add(self, batch: pa.RecordBatch, hashes: Hashes) -> None:
        """Add the next rows of the table, with their session hashes, uint64 ``[rows]``."""
        self._held.append(self._sampled(hashes, batch))
        while sum(rows.nbytes for _, rows in self._held) > self._max_bytes and self._limit > 1:
            self._limit //= 2
            self._held = [self._sampled(*each) for each in self._held]
        if len(self._held) > _MAX_BATCHES:
            self._held = [self._joined()]

    def by_session(self, time: str) -> tuple[Hashes, pa.RecordBatch]:
        """Return session hashes and rows, sorted by session and by the column ``time``."""
        hashes, rows = self._joined()
        self._held = []
        order = {"session": hashes, "time": rows[time], "row": np.arange(len(hashes))}
        places = pc.sort_indices(pa.table(order), [(name, "ascending") for name in order])
        return hashes[places.to_numpy()], rows.take(places)

    def _sampled(self, hashes: Hashes, batch: pa.RecordBatch) -> tuple[Hashes, pa.RecordBatch]:
        if self._limit == _ALL_HASHES:
            return hashes, batch
        chosen = hashes < np.uint64(self._limit)
        return hashes[chosen], batch.filter(pa.array(chosen))

    def _joined(self) -> tuple[Hashes, pa.RecordBatch]:
        hashes, batches = zip(*self._held, strict=True)
        return np.concatenate(hashes), pa.concat_batches(batches)


class BatchMeter:
    """Measures DedupeFactors: deduplicates rows batch by batch, as a converter does.

    An incomplete last batch is ignored, except if it is the only batch.

    Args:
        names: names of the features.
        batch_size: rows per batch.

    Attributes:
        rows: number of measured rows.
        sessions: number of distinct sessions of each batch, summed over batches.
    """

    def __init__(self, names: Sequence[str], batch_size: int) -> None:
        self._names, self._batch_size = names, batch_size
        self._deduplicate = dedup.Deduplicator()
        self._waiting: list[tuple[Hashes, pa.RecordBatch]] = []
        self._num_waiting = self.rows = self.sessions = 0
        self._ids = np.zeros((2, len(names)), np.int64)

    def add(self, batch: pa.RecordBatch, hashes: Hashes) -> None:
        """Add rows with features as list<int64>. ``hashes``: session hashes, uint64 ``[rows]``."""
        start = 0
        while start < len(hashes):
            end = min(start + self._batch_size - self._num_waiting, len(hashes))
            self._waiting.append((hashes[start:end], batch.slice(start, end - start)))
            self._num_waiting += end - start
            start = end
            if self._num_waiting == self._batch_size:
                self._measure()

    def finish(self) -> None:
        """Measure the last batch if it is the only batch. Call it after all rows."""
        if not self.rows and self._num_waiting:
            self._measure()

    def factors(self) -> list[float]:
        """Return the DedupeFactor of each feature: its ids divided by its ids in unique rows."""
        return [ids / stored if stored else 1.0 for ids, stored in self._ids.T.tolist()]

    def total_factor(self) -> float:
        """Return the DedupeFactor over all features."""
        ids, stored = self._ids.sum(1).tolist()
        return ids / stored if stored else 1.0

    def _measure(self) -> None:
        hashes, batches = zip(*self._waiting, strict=True)
        batch = pa.concat_batches(batches)
        self._waiting, self._num_waiting = [], 0
        columns = [batch.column(name) for name in self._names]
        groups = [[(lists.values.to_numpy(), lists.offsets.to_numpy())] for lists in columns]
        for index, unique in enumerate(self._deduplicate(groups, batch.num_rows)):
            ends = groups[index][0][1]
            self._ids[:, index] += int(ends[-1] - ends[0]), unique.values[0].size
        self.rows += batch.num_rows
        self.sessions += len(np.unique(np.concatenate(hashes)))
