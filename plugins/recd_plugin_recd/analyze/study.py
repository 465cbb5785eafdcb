"""Reads a table once and measures how much of it repeats (RecD, section 3)."""

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

#: Rows of a batch where nothing says how many.
_BATCH_SIZE = 4096
#: A sample with fewer sessions than this advises nothing.
MIN_SESSIONS = 32
#: A feature is worth deduplicating from this DedupeFactor on (RecD, section 4.3).
MIN_FACTOR = 1.5
#: Partial deduplication is worth its offsets where it stores so much less than exact.
MIN_GAIN = 1.2
#: What a group keeps at least of the DedupeFactor that each of its features has alone.
_MIN_KEPT = 0.9
_VERSION = 2

Form = Literal["plain", "exact", "partial"]


@dataclass(frozen=True)
class FeatureReport:
    """Duplication of one feature.

    Attributes:
        name: its column.
        length: l, mean ids of a row.
        stays: d, the probability that the next row of a session has the same list.
        exact: share of ids in rows that equal the row before in their session.
        partial: share of ids that the row before has too.
        measured_as_is: DedupeFactor in batches of the table as it is.
        predicted_by_session, measured_by_session: DedupeFactor once the table is by session, by the
            paper's formula and in batches.
        partial_factor: DedupeFactor of partial deduplication by session.
        form: what pays once the table is by session; None where the sample is too small to tell.
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
    """Features to deduplicate with one inverse lookup, and their DedupeFactor as one group."""

    features: tuple[str, ...]
    dedupe_factor: float


@dataclass(frozen=True)
class SampleReport:
    """Rows that "by session" was measured on, ``whole`` for all rows of the table."""

    whole: bool
    rows: int
    sessions: int
    megabytes: int

    @property
    def too_small(self) -> bool:
        return not self.whole and self.sessions < MIN_SESSIONS


@dataclass(frozen=True)
class StorageReport:
    """Parquet bytes of the features of a row.

    Attributes:
        stored: in the files as they are; None where rows come from no Parquet files.
        by_session, by_session_dict: of the sample, written by session as ``recd cluster`` does, in
            layout ``list`` and ``list_dict``.
    """

    stored: float | None
    by_session: float
    by_session_dict: float


@dataclass(frozen=True)
class TableAnalysis:
    """A table's characterisation.

    Attributes:
        path: of the table or registry file.
        clustered: whether the rows of each session lie together.
        rows, ids: of the table.
        partitions: of the table, 1 where it has none.
        batch_size: B.
        sessions: rows of sessions in a partition.
        batches: batches as the table is.
        exact, partial: shares of ids, over all features.
        factor_as_is: DedupeFactor measured in batches of the table, over all features.
        factor_by_session, partial_factor: by session, exact and partial.
        features: in the order of the table.
        groups: of the features to deduplicate.
        sample: what "by session" rests on.
        storage: bytes a row.
        converter: a section for registry.yaml; None where the sample is too small to tell.
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
        """Return JSON values; factors without bound are infinite."""
        return {"version": _VERSION, **asdict(self)}


def study(
    source: SessionTable,
    *,
    batch_size: int | None = None,
    sample_megabytes: int,
    nulls: Nulls = "error",
    progress: Callable[[int], None] = lambda _rows: None,
) -> TableAnalysis:
    """Characterise a table.

    Memory is two batches, the sample about twice, and 24 bytes for each session of a partition.

    Args:
        source: the table.
        batch_size: rows of a batch; None takes the source's, or else 4096.
        sample_megabytes: millions of bytes of whole sessions to hold.
        nulls: ``empty`` reads a null in place of a list as an empty list.
        progress: gets rows as they are read.
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
    # A clustered table is known in full; otherwise the sample tells what it would be by session.
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
    """Return the form that pays for a feature with these DedupeFactors."""
    if partial >= MIN_FACTOR and partial >= MIN_GAIN * exact:
        return "partial"
    return "exact" if exact >= MIN_FACTOR else "plain"


def _as_lists(rows: Rows, source: SessionTable, nulls: Nulls) -> pa.RecordBatch:
    """Return features as list<int64>, whatever their layout, and the columns of the keys."""
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
    """The sample by session and time, measured in batches of ``batch_size``."""

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
        """Group features of ``among`` that change together and lose little by being one group."""
        groups = list(coinciding({name: self._changed[name] for name in among}))
        _, together = self._measured(groups)
        found = []
        for group in groups:
            alone = [self.factors[(name,)] for name in group]
            if together[group] >= _MIN_KEPT * min(alone):
                found.append(DedupGroupReport(group, together[group]))
            else:  # features that repeat in other sessions too, each in rows of its own
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
            # A list's values are two levels below it; names may have dots of their own.
            if name in wanted or name.rsplit(".", 2)[0] in wanted:
                total += column.total_compressed_size
    return total


def _converter_section(
    features: Sequence[FeatureReport], groups: Sequence[DedupGroupReport]
) -> str:
    """Return the section ``converter`` of a registry file that follows these reports."""
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
