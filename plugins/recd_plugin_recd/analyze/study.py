"""Reads a table once and measures its duplication (RecD, section 3)."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML

from recd_plugin_recd.analyze.samples import (
    BatchMeter,
    BatchSummary,
    Hashes,
    SessionCounts,
    SessionSample,
    SessionSummary,
    coinciding,
)
from recd_plugin_recd.sessions import Nulls, SessionTable, session_hashes, without_nulls
from recd_plugins.api import (
    DataError,
    Rows,
    SessionKeys,
    TableStatistics,
    arrow,
    column_statistics,
    data_profiles,
    list_dict,
    parquet_writer,
)

#: Default batch size.
_BATCH_SIZE = 4096
#: Minimum number of sessions in a sample for a recommendation.
MIN_SESSIONS = 32
#: Minimum DedupeFactor for which deduplicating a feature pays off (RecD, section 4.3).
MIN_FACTOR = 1.5
#: Partial deduplication pays off if it stores at most this fraction of exact deduplication.
MIN_GAIN = 1.2
#: Fraction of its features' own DedupeFactors that a group must keep.
_MIN_KEPT = 0.9
_VERSION = 2

Form = Literal["plain", "exact", "partial"]


@dataclass(frozen=True)
class FeatureReport:
    """Duplication of one feature.

    Attributes:
        name: its column.
        length: l, the mean number of ids per row.
        stays: d, the probability that the next row of a session has the same list.
        exact: fraction of ids in rows equal to the previous row of the session.
        partial: fraction of ids that also occur in the previous row.
        measured_as_is: DedupeFactor measured in batches of the table in its current order.
        predicted_by_session, measured_by_session: DedupeFactor after sorting by session, from the
            paper's formula and measured in batches.
        partial_factor: DedupeFactor of partial deduplication after sorting by session.
        form: form that pays off after sorting by session; None if the sample is too small.
    """

    name: str
    length: float
    stays: float
    exact: float
    partial: float
    measured_as_is: float
    predicted_by_session: float
    measured_by_session: float
    partial_factor: float
    form: Form | None


@dataclass(frozen=True)
class DedupGroupReport:
    """Features to deduplicate with one inverse lookup, and the DedupeFactor of this group."""

    features: tuple[str, ...]
    dedupe_factor: float


@dataclass(frozen=True)
class SampleReport:
    """Size of the sample behind the "by session" figures; ``whole`` if it is the whole table."""

    whole: bool
    rows: int
    sessions: int
    megabytes: int

    @property
    def too_small(self) -> bool:
        return not self.whole and self.sessions < MIN_SESSIONS


@dataclass(frozen=True)
class StorageReport:
    """Parquet bytes of the features per row.

    Attributes:
        stored: in the current files; None if the source is not Parquet.
        by_session, by_session_dict: of the sample, sorted as by ``recd cluster``, in layouts
            ``list`` and ``list_dict``.
    """

    stored: float | None
    by_session: float
    by_session_dict: float


@dataclass(frozen=True)
class TableAnalysis:
    """Duplication statistics of a table.

    Attributes:
        path: of the table or registry file.
        clustered: whether the rows of each session are adjacent.
        rows, ids: of the table.
        partitions: number of partitions, 1 if the table is not partitioned.
        batch_size: B.
        sessions: session statistics per partition.
        batches: statistics of batches in the table's current order.
        exact, partial: exact and partial duplicate fractions of the ids of all features.
        factor_as_is: DedupeFactor of all features, measured in batches of the table in its current
            order.
        factor_by_session, partial_factor: exact and partial DedupeFactor after sorting by session.
        features: feature reports in table order.
        groups: groups of features to deduplicate.
        sample: size of the sample behind the "by session" figures.
        storage: Parquet bytes per row.
        converter: converter section for registry.yaml; None if the sample is too small.
    """

    path: str
    clustered: bool
    rows: int
    ids: int
    partitions: int
    batch_size: int
    sessions: SessionSummary
    batches: BatchSummary
    exact: float
    partial: float
    factor_as_is: float
    factor_by_session: float
    partial_factor: float
    features: tuple[FeatureReport, ...]
    groups: tuple[DedupGroupReport, ...]
    sample: SampleReport
    storage: StorageReport
    converter: str | None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. Unbounded factors become infinity."""
        return {"version": _VERSION, **asdict(self)}


def study(
    source: SessionTable,
    *,
    batch_size: int | None = None,
    sample_megabytes: int,
    nulls: Nulls = "error",
    progress: Callable[[int], None] = lambda _rows: None,
) -> TableAnalysis:
    """Measure the duplication of a table.

    Memory use: two batches, about twice the sample, and 24 bytes per session of a partition.

    Args:
        source: the table.
        batch_size: rows per batch; None means the source's batch size, or 4096 if it has none.
        sample_megabytes: maximum size of the sample of whole sessions, in MB.
        nulls: ``empty`` reads a null list as an empty list.
        progress: called with the number of rows read.
    """
    if not source.features:
        columns = ", ".join(f"{field.name} ({field.type})" for field in source.schema)
        raise DataError(
            f"{source.path}: no column of lists of integers to analyze, of int64 or smaller; the "
            f"columns are {columns}"
        )
    keys, names = source.keys, source.features
    size = batch_size or source.batch_size or _BATCH_SIZE
    counts, sample = SessionCounts(), SessionSample(sample_megabytes * 1_000_000)
    meter = BatchMeter([(name,) for name in names], size)
    parts: list[TableStatistics] = []
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
        raise DataError(f"{source.path}: the table has no rows")
    stored, sessions = TableStatistics.merge(parts), counts.result()
    by_session = _BySession(*sample.by_session(keys.timestamp), keys, names, size)
    clustered = not sessions.torn
    # A clustered table is measured directly. Otherwise the sample shows the effect of clustering.
    known = stored if clustered else by_session.statistics
    batches, factors = meter.result(), meter.dedupe_factors()
    sorted_factors = factors if clustered else by_session.factors
    found = SampleReport(
        len(by_session.hashes) == stored.rows,
        len(by_session.hashes),
        by_session.statistics.sessions,
        sample_megabytes,
    )
    features = []
    for name in names:
        feature, exact = known.features[name], sorted_factors[(name,)]
        partial = feature.partial_dedupe_factor
        features.append(
            FeatureReport(
                name=name,
                length=feature.length,
                stays=feature.stays,
                exact=feature.exact_duplication,
                partial=feature.partial_duplication,
                measured_as_is=factors[(name,)],
                predicted_by_session=data_profiles.dedupe_factor(
                    sessions.samples_per_session, feature.stays
                ),
                measured_by_session=exact,
                partial_factor=partial,
                form=None if found.too_small else choose_form(exact, partial),
            )
        )
    groups = by_session.groups([each.name for each in features if each.form in FORMS])
    total = known.total
    return TableAnalysis(
        path=str(source.path),
        clustered=clustered,
        rows=stored.rows,
        ids=stored.total.ids,
        partitions=len(source.partitions),
        batch_size=size,
        sessions=sessions,
        batches=batches,
        exact=total.exact_duplication,
        partial=total.partial_duplication,
        factor_as_is=meter.total_factor(),
        factor_by_session=(meter if clustered else by_session.meter).total_factor(),
        partial_factor=total.partial_dedupe_factor,
        features=tuple(features),
        groups=groups,
        sample=found,
        storage=StorageReport(
            _stored_bytes(source),
            _written_bytes(by_session.rows, names, keys, "list"),
            _written_bytes(by_session.rows, names, keys, "list_dict"),
        ),
        converter=None if found.too_small else _converter_section(features, groups),
    )


#: Forms that deduplicate a feature.
FORMS: tuple[Form, ...] = ("exact", "partial")


def choose_form(exact: float, partial: float) -> Form:
    """Return the form that pays off for a feature with these DedupeFactors."""
    if partial >= MIN_FACTOR and partial >= MIN_GAIN * exact:
        return "partial"
    return "exact" if exact >= MIN_FACTOR else "plain"


def _as_lists(rows: Rows, source: SessionTable, nulls: Nulls) -> pa.RecordBatch:
    """Return features of any layout as list<int64>, together with the key columns."""
    rows, columns = without_nulls(rows, source.features, nulls), {}
    for name in source.features:
        ids, offsets = arrow.sparse_column(rows, name)
        first, last = int(offsets[0]), int(offsets[-1])
        ends = (offsets - first).astype(np.int32)
        columns[name] = pa.ListArray.from_arrays(ends, ids[first:last])
    for name in (source.keys.session, source.keys.timestamp):
        columns[name] = rows.data[name]
    return pa.record_batch(columns)


class _BySession:
    """The sample sorted by session and time, measured in batches of ``batch_size``."""

    def __init__(
        self,
        hashes: Hashes,
        rows: pa.RecordBatch,
        keys: SessionKeys,
        names: Sequence[str],
        batch_size: int,
    ) -> None:
        self.hashes, self.rows, self._batch_size = hashes, rows, batch_size
        accumulator = column_statistics.StatisticsAccumulator(rows.schema, keys, names)
        changed = accumulator.add(rows)
        changed[:, 1:] &= hashes[1:] == hashes[:-1]
        self._changed = dict(zip(names, changed, strict=True))
        self.statistics = accumulator.result()
        self.meter, self.factors = self._measured([(name,) for name in names])

    def groups(self, among: Sequence[str]) -> tuple[DedupGroupReport, ...]:
        """Group features of ``among`` that change together and lose little when grouped."""
        groups = list(coinciding({name: self._changed[name] for name in among}))
        _, together = self._measured(groups)
        found = []
        for group in groups:
            alone = [self.factors[(name,)] for name in group]
            if together[group] >= _MIN_KEPT * min(alone):
                found.append(DedupGroupReport(group, together[group]))
            else:  # features that also repeat in other sessions, each in different rows
                pairs = zip(group, alone, strict=True)
                found += [DedupGroupReport((name,), factor) for name, factor in pairs]
        return tuple(found)

    def _measured(
        self, groups: Sequence[tuple[str, ...]]
    ) -> tuple[BatchMeter, dict[tuple[str, ...], float]]:
        meter = BatchMeter(groups, self._batch_size)
        meter.add(self.rows, self.hashes)
        meter.result()
        return meter, meter.dedupe_factors()


def _stored_bytes(source: SessionTable) -> float | None:
    files = [file for partition in source.partitions for file in partition.files]
    rows = sum(pq.read_metadata(file).num_rows for file in files)
    return sum(_feature_bytes(file, source.features) for file in files) / rows if rows else None


def _written_bytes(
    rows: pa.RecordBatch, features: Sequence[str], keys: SessionKeys, layout: list_dict.Layout
) -> float:
    with tempfile.TemporaryDirectory(prefix="recd-analyze-") as folder:
        path = Path(folder) / "sample.parquet"
        with parquet_writer.TableWriter(path, rows.schema, keys=keys, layout=layout) as writer:
            writer.write(rows)
        return _feature_bytes(path, features) / max(1, len(rows))


def _feature_bytes(path: Path, features: Sequence[str]) -> int:
    metadata, wanted, total = pq.read_metadata(path), set(features), 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            name = column.path_in_schema
            # A list's values are two levels below the list column. Names may contain dots.
            if name in wanted or name.rsplit(".", 2)[0] in wanted:
                total += column.total_compressed_size
    return total


def _converter_section(
    features: Sequence[FeatureReport], groups: Sequence[DedupGroupReport]
) -> str:
    """Return the registry file's ``converter`` section that matches these reports."""
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
