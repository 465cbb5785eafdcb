"""Reads a table once and measures it."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from ruamel.yaml import YAML

from recd_plugin_recd.analyze.report import (
    BatchSizeFrom,
    DedupGroupReport,
    FeatureReport,
    Form,
    SampleReport,
    StorageEstimate,
    TableAnalysis,
)
from recd_plugin_recd.analyze.samples import (
    BatchMeter,
    BatchSummary,
    SessionCounts,
    SessionSample,
)
from recd_plugin_recd.sessions import Nulls, check_sessions, session_hashes, without_nulls
from recd_plugin_recd.source import SessionTable
from recd_plugins.api import (
    DataError,
    FeatureStatistics,
    Layout,
    Rows,
    SessionKeys,
    StatisticsAccumulator,
    TableStatistics,
    TableWriter,
    dedupe_factor,
    session_column,
    sparse_column,
)

#: Rows of a table that are written anew in their order, to see what they take.
_ROWS_TO_WRITE = 8192
#: Rows of a batch where nothing says how many.
_BATCH_SIZE = 4096


def study(
    source: SessionTable,
    *,
    batch_size: int | None = None,
    sample_megabytes: int,
    nulls: Nulls = "error",
    progress: Callable[[int], None] = lambda _rows: None,
) -> TableAnalysis:
    """Characterise a table.

    Memory does not grow with the table: two batches, the sample about twice, and some 10 MB for
    counts of sessions.

    Args:
        source: the table.
        batch_size: rows of a batch; None takes the source's, or else 4096.
        sample_megabytes: millions of bytes of whole sessions to hold, as Arrow data.
        nulls: ``empty`` reads a null in place of a list as an empty list.
        progress: gets rows as they are read.
    """
    if not source.features:
        raise DataError(
            f"{source.path}: no column of lists of integers to analyze, of int64 or smaller; the "
            "columns are "
            f"{', '.join(f'{field.name} ({field.type})' for field in source.schema)}"
        )
    reading = _Reading(source, batch_size, sample_megabytes, nulls)
    reading.run(progress)
    return reading.report()


class _Reading:
    """One pass over a table."""

    def __init__(
        self, source: SessionTable, batch_size: int | None, sample_megabytes: int, nulls: Nulls
    ) -> None:
        self._source = source
        self._features = source.features
        self._nulls = nulls
        self._batch_size_from: BatchSizeFrom = "--batch-size"
        if batch_size is None:
            batch_size = source.batch_size or _BATCH_SIZE
            self._batch_size_from = "training.batch_size" if source.batch_size else "default"
        self._batch_size = batch_size
        self._sample_megabytes = sample_megabytes
        sample_bytes = sample_megabytes * 1_000_000
        self._counts = SessionCounts()
        self._sample = SessionSample(source.keys, sample_bytes)
        self._meter = BatchMeter([(name,) for name in self._features], batch_size)
        self._window = _Window(
            max(0, (source.num_rows or 0) - _ROWS_TO_WRITE) // 2, sample_bytes // 4
        )
        self._parts: list[TableStatistics] = []
        self._schema = pa.schema([])
        self._num_rows = 0

    def run(self, progress: Callable[[int], None]) -> None:
        source = self._source
        keys = dict.fromkeys((source.keys.session, source.keys.timestamp))
        columns = [*self._features, *keys]
        for number, partition in enumerate(source.partitions):
            statistics: StatisticsAccumulator | None = None
            for rows in source.read(partition, columns):
                lists = self._as_lists(rows)
                check_sessions(rows, source.keys.session)
                hashes = session_hashes(session_column(rows, source.keys.session), number)
                if statistics is None:
                    self._schema = lists.schema
                    statistics = StatisticsAccumulator(lists.schema, source.keys, self._features)
                statistics.add(Rows(lists, rows.origins))
                self._counts.add(hashes)
                self._meter.add(lists, hashes)
                self._sample.add(lists, hashes)
                self._window.add(lists)
                self._num_rows += len(rows)
                progress(len(rows))
            if statistics is not None:
                self._parts.append(statistics.result())
        if not self._num_rows:
            raise DataError(f"{source.path}: the table has no rows")

    def report(self) -> TableAnalysis:
        sessions, as_is = self._counts.result(), self._meter.result()
        as_stored = TableStatistics.merge(self._parts)
        by_session = BySession(self._sample, self._source.keys, self._features, self._batch_size)
        # A table that is clustered is known in full; the rest is learnt from the sample.
        known = as_stored if sessions.clustered else by_session.statistics
        batches = as_is if sessions.clustered else by_session.batches
        sample = SampleReport(
            whole=self._sample.num_rows == self._num_rows,
            rows=self._sample.num_rows,
            sessions=by_session.statistics.sessions,
            megabytes=self._sample_megabytes,
            errors={} if sessions.clustered else by_session.errors(),
        )
        features = tuple(
            _feature(name, known.features[name], sessions.samples_per_session, as_is, batches)
            for name in self._features
        )
        if sample.too_small:
            features = tuple(replace(each, form=None) for each in features)
        groups = by_session.groups([each.name for each in features if each.deduplicated])
        total = known.total
        return TableAnalysis(
            path=str(self._source.path),
            rows=self._num_rows,
            partitions=len(self._source.partitions),
            batch_size=self._batch_size,
            batch_size_from=self._batch_size_from,
            ids=as_stored.total.ids,
            sessions=sessions,
            first_break=None if sessions.first_break is None else self._place(sessions.first_break),
            batches=as_is,
            batches_by_session=batches,
            exact=total.exact_duplication,
            partial=total.partial_duplication,
            exact_rows=total.exact_rows,
            factor_as_is=_overall(as_is, as_stored),
            factor_by_session=_overall(batches, known),
            partial_factor=total.partial_dedupe_factor,
            features=features,
            groups=groups,
            sample=sample,
            storage=self._storage(),
            converter=None if sample.too_small else converter_section(features, groups),
        )

    def _as_lists(self, rows: Rows) -> pa.RecordBatch:
        """Features as list<int64>, whatever their layout, and the columns of session and time."""
        rows = without_nulls(rows, self._features, self._nulls)
        columns = {name: sparse_column(rows, name) for name in self._features}
        lists = {name: _lists(ids, offsets) for name, (ids, offsets) in columns.items()}
        keys = self._source.keys
        return pa.record_batch(
            {**lists, **{name: rows.data[name] for name in (keys.session, keys.timestamp)}}
        )

    def _place(self, row: int) -> str:
        """File and row in it of a row of the table, which is read again up to there."""
        source, before = self._source, 0
        for partition in source.partitions:
            for rows in source.read(partition, [source.keys.session]):
                if row < before + len(rows):
                    path, row_in_file = rows.origin_of(row - before)
                    return f"{path}: row {row_in_file} (from 0)"
                before += len(rows)
        raise DataError(f"{source.path} was replaced while it was read; start anew")

    def _storage(self) -> StorageEstimate:
        keys, schema = self._source.keys, self._schema

        def by_session(layout: Layout) -> float:
            batches = (batch for _, batch in self._sample.by_session())
            return written_bytes(batches, schema, self._features, keys, layout)

        return StorageEstimate(
            stored=stored_bytes(self._source),
            as_read=written_bytes(self._window.batches, schema, self._features, None, "list"),
            by_session=by_session("list"),
            by_session_dict=by_session("list_dict"),
            rows_as_read=sum(batch.num_rows for batch in self._window.batches),
            rows_by_session=self._sample.num_rows,
        )


class _Window:
    """Neighbouring rows of a table: ``_ROWS_TO_WRITE`` from one on, or fewer if they are large."""

    def __init__(self, first_row: int, max_bytes: int) -> None:
        self._skip = first_row
        self._missing = _ROWS_TO_WRITE
        self._bytes_left = max_bytes
        self.batches: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch) -> None:
        skipped = min(self._skip, batch.num_rows)
        self._skip -= skipped
        taken = batch.slice(skipped, self._missing)
        if taken.num_rows and self._bytes_left > 0:
            self.batches.append(taken)
            self._missing -= taken.num_rows
            self._bytes_left -= taken.nbytes


def _feature(
    name: str,
    statistics: FeatureStatistics,
    samples_per_session: float,
    as_is: BatchSummary,
    by_session: BatchSummary,
) -> FeatureReport:
    exact, partial = by_session.dedupe_factors[(name,)], statistics.partial_dedupe_factor
    return FeatureReport(
        name=name,
        length=statistics.length,
        stays=statistics.stays,
        exact_rows=statistics.exact_rows,
        exact=statistics.exact_duplication,
        partial=statistics.partial_duplication,
        predicted_as_is=dedupe_factor(as_is.samples_per_session, statistics.stays),
        measured_as_is=as_is.dedupe_factors[(name,)],
        predicted_by_session=dedupe_factor(samples_per_session, statistics.stays),
        measured_by_session=exact,
        partial_factor=partial,
        form=choose_form(exact, partial),
    )


def _overall(batches: BatchSummary, statistics: TableStatistics) -> float:
    """Ids over ids in unique rows, of all features together."""
    lengths = {name: feature.length for name, feature in statistics.features.items()}
    unique = sum(
        lengths[name] / factor for group, factor in batches.dedupe_factors.items() for name in group
    )
    return sum(lengths.values()) / unique if unique else 1.0


def _lists(ids: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    first, last = int(offsets[0]), int(offsets[-1])
    return pa.ListArray.from_arrays((offsets - first).astype(np.int32), ids[first:last])


#: Figures whose sampling error is told.
_FIGURES: dict[str, Callable[[FeatureStatistics], float]] = {
    "exact": lambda total: total.exact_duplication,
    "partial": lambda total: total.partial_duplication,
    "factor_by_session": lambda total: total.dedupe_factor,
    "partial_factor": lambda total: total.partial_dedupe_factor,
}
#: Of the DedupeFactor that a feature has alone, what it keeps in a group at least.
_MIN_KEPT = 0.9


class BySession:
    """Measures the sample, by session and time, in batches of ``batch_size``."""

    def __init__(
        self, sample: SessionSample, keys: SessionKeys, features: Sequence[str], batch_size: int
    ) -> None:
        self._sample = sample
        self._batch_size = batch_size
        self._co_changes = CoChanges(features)
        self._parts: list[TableStatistics] = []
        meter = BatchMeter([(name,) for name in features], batch_size)
        for hashes, batch in sample.by_session():
            accumulator = StatisticsAccumulator(batch.schema, keys, features)
            changed = accumulator.add(batch)
            changed[:, 1:] &= hashes[1:] == hashes[:-1]
            self._co_changes.add(changed)
            self._parts.append(accumulator.result())
            meter.add(batch, hashes)
        self.batches = meter.result()

    @cached_property
    def statistics(self) -> TableStatistics:
        """The statistics of the whole sample."""
        return TableStatistics.merge(self._parts)

    def groups(self, among: Sequence[str]) -> tuple[DedupGroupReport, ...]:
        """Features of ``among`` that change together, and what deduplicating them so gives.

        Features that repeat in rows of other sessions too, each with its own, are better alone: a
        group that loses by being one is not made.
        """
        groups = self._co_changes.groups(among)
        meter = BatchMeter(groups, self._batch_size)
        for hashes, batch in self._sample.by_session():
            meter.add(batch, hashes)
        factors, alone = meter.result().dedupe_factors, self.batches.dedupe_factors
        found = []
        for group in groups:
            if factors[group] >= _MIN_KEPT * min(alone[(name,)] for name in group):
                found.append(DedupGroupReport(group, factors[group]))
            else:
                found += [DedupGroupReport((name,), alone[(name,)]) for name in group]
        return tuple(found)

    def errors(self) -> dict[str, float]:
        """Standard errors of figures over all features, from how the sample's parts differ."""
        if len(self._parts) < 2:
            return {}
        left_out = np.sqrt((1 - self._sample.rate) / len(self._parts))
        spreads = {
            name: np.std([figure(part.total) for part in self._parts], ddof=1)
            for name, figure in _FIGURES.items()
        }
        return {name: float(spread * left_out) for name, spread in spreads.items()}


#: Share of the changes of two features that coincide, from which they form a group.
MIN_COINCIDENCE = 0.95


class CoChanges:
    """Counts in how many rows each two features change together."""

    def __init__(self, features: Sequence[str]) -> None:
        self._features = tuple(features)
        self._together = np.zeros((len(self._features),) * 2)

    def add(self, changed: NDArray[np.bool_]) -> None:
        """Add rows: bool ``[num_features, rows]``, whether a row is not the session's last one."""
        flags = changed.astype(np.float32)
        self._together += flags @ flags.T

    def groups(self, among: Sequence[str]) -> list[tuple[str, ...]]:
        """The features of ``among``, those together that change together; in their order.

        A feature joins the first group with whose first feature nearly all its changes coincide.
        """
        groups: list[list[str]] = []
        for name in among:
            for group in groups:
                if self._coincidence(group[0], name) >= MIN_COINCIDENCE:
                    group.append(name)
                    break
            else:
                groups.append([name])
        return [tuple(group) for group in groups]

    def _coincidence(self, one: str, other: str) -> float:
        """Rows in which both change over rows in which either does."""
        i, j = self._features.index(one), self._features.index(other)
        both = self._together[i, j]
        either = self._together[i, i] + self._together[j, j] - both
        return float(both / either) if either else 1.0


def stored_bytes(source: SessionTable) -> float | None:
    """Bytes of the features of a row in the files of a table, from their metadata."""
    total = rows = 0
    for file in (file for partition in source.partitions for file in partition.files):
        total += _feature_bytes(file, source.features)
        rows += pq.read_metadata(file).num_rows
    return total / rows if rows else None


def written_bytes(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    features: Sequence[str],
    keys: SessionKeys | None,
    layout: Layout,
) -> float:
    """Bytes of the features of a row when rows are written as ``recd cluster`` does."""
    with tempfile.TemporaryDirectory(prefix="recd-analyze-") as folder:
        path = Path(folder) / "sample.parquet"
        with TableWriter(path, schema, keys=keys, layout=layout) as writer:
            for batch in batches:
                writer.write(batch)
        rows = pq.read_metadata(path).num_rows
        return _feature_bytes(path, features) / rows if rows else 0.0


def _feature_bytes(path: Path, features: Sequence[str]) -> int:
    metadata, wanted, total = pq.read_metadata(path), set(features), 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            path_in_schema = column.path_in_schema
            # A list's values are two levels below it; names may have dots of their own.
            if path_in_schema in wanted or path_in_schema.rsplit(".", 2)[0] in wanted:
                total += column.total_compressed_size
    return total


#: A feature is worth deduplicating from this DedupeFactor on (RecD, section 4.3).
MIN_FACTOR = 1.5
#: Partial deduplication is worth its offsets where it stores so much less than exact.
MIN_GAIN = 1.2


def choose_form(exact: float, partial: float) -> Form:
    """The form that pays for a feature with these DedupeFactors."""
    if partial >= MIN_FACTOR and partial >= MIN_GAIN * exact:
        return "partial"
    return "exact" if exact >= MIN_FACTOR else "plain"


def converter_section(features: Sequence[FeatureReport], groups: Sequence[DedupGroupReport]) -> str:
    """The section ``converter`` of a registry file that follows these reports."""
    partial = [each.name for each in features if each.form == "partial"]
    kept = [[name for name in group.features if name not in partial] for group in groups]
    exact = [names for names in kept if names]
    section: dict[str, Any] = {"use": "recd.kjt"}
    if partial:
        section = {"use": "recd.partial_ikjt", "options": {"features": partial, "groups": exact}}
    elif exact:
        section = {"use": "recd.ikjt", "options": {"groups": exact}}
    yaml, text = YAML(), io.StringIO()
    yaml.default_flow_style = None
    yaml.width = 88
    yaml.dump({"converter": section}, text)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
