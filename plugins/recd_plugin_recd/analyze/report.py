"""What ``recd analyze`` found: as JSON, and in sentences for the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from recd_plugin_recd.analyze.samples import NUM_PARTS, BatchSummary, SessionSummary
from recd_plugins.api import bytes_text


@dataclass(frozen=True)
class StorageEstimate:
    """Bytes of the features of a row.

    Attributes:
        stored: in the files as they are; None where rows come from no Parquet files.
        as_read: neighbouring rows of the table, written anew in the order in which they stand.
        by_session, by_session_dict: the sampled sessions, written by session in the layouts
            ``list`` and ``list_dict``. These three have the settings of ``recd cluster``.
        rows_as_read, rows_by_session: how many rows were written to learn that.
    """

    stored: float | None
    as_read: float
    by_session: float
    by_session_dict: float
    rows_as_read: int
    rows_by_session: int


Form = Literal["plain", "exact", "partial"]
BatchSizeFrom = Literal["--batch-size", "training.batch_size", "default"]

#: A sample with fewer sessions than this advises nothing: two for each part of it.
MIN_SESSIONS = 2 * NUM_PARTS

_VERSION = 1


@dataclass(frozen=True)
class FeatureReport:
    """One feature.

    Attributes:
        name: its column.
        length: l, mean ids of a row.
        stays: d, the probability that the next row of a session has the same list.
        exact_rows: share of rows that equal the row before in their session.
        exact: the same weighted by length: share of ids.
        partial: share of ids that the row before has too.
        predicted_as_is, measured_as_is: DedupeFactor in a batch of the table as it is: by the
            formula at the batch's S, and as a converter finds it.
        predicted_by_session: by the formula at the table's S.
        measured_by_session: in a batch of the table by session.
        partial_factor: DedupeFactor of partial deduplication by session.
        form: what pays once the table is by session; None where the sample is too small to tell.
    """

    name: str
    length: float
    stays: float
    exact_rows: float
    exact: float
    partial: float
    predicted_as_is: float
    measured_as_is: float
    predicted_by_session: float
    measured_by_session: float
    partial_factor: float
    form: Form | None

    @property
    def deduplicated(self) -> bool:
        """Whether it pays to deduplicate it."""
        return self.form in ("exact", "partial")


@dataclass(frozen=True)
class DedupGroupReport:
    """Features to deduplicate with one inverse lookup, and the DedupeFactor that they have then."""

    features: tuple[str, ...]
    dedupe_factor: float


@dataclass(frozen=True)
class SampleReport:
    """The rows from which "by session" was learnt.

    Attributes:
        whole: whether these are all rows of the table.
        rows, sessions: how many.
        megabytes: at most held, in millions of bytes.
        errors: standard errors that come of sampling, by figure.
    """

    whole: bool
    rows: int
    sessions: int
    megabytes: int
    errors: dict[str, float]

    @property
    def too_small(self) -> bool:
        """Whether it has too few sessions to tell what pays."""
        return not self.whole and self.sessions < MIN_SESSIONS


@dataclass(frozen=True)
class TableAnalysis:
    """A table's characterisation.

    Attributes:
        path: of the table or registry file.
        rows: of the table.
        partitions: of the table, 1 where it has none.
        batch_size: B.
        batch_size_from: what set it: --batch-size, training.batch_size, or default.
        ids: of all rows and features.
        sessions: rows of sessions in a partition.
        first_break: file and row at which a session goes on after rows of others; None if the
            counted sessions lie together.
        batches: batches as the table is.
        batches_by_session: batches of the sample by session.
        exact, partial: shares of ids, over all features.
        exact_rows: mean over the features.
        factor_as_is: DedupeFactor measured in batches of the table, over all features.
        factor_by_session, partial_factor: by session, exact and partial.
        features: in the order of the table.
        groups: of the features to deduplicate.
        sample: what "by session" rests on.
        storage: bytes a row.
        converter: a section for registry.yaml; None where the sample is too small to tell.
    """

    path: str
    rows: int
    partitions: int
    batch_size: int
    batch_size_from: BatchSizeFrom
    ids: int
    sessions: SessionSummary
    first_break: str | None
    batches: BatchSummary
    batches_by_session: BatchSummary
    exact: float
    partial: float
    exact_rows: float
    factor_as_is: float
    factor_by_session: float
    partial_factor: float
    features: tuple[FeatureReport, ...]
    groups: tuple[DedupGroupReport, ...]
    sample: SampleReport
    storage: StorageEstimate
    converter: str | None

    @property
    def clustered(self) -> bool:
        """Whether the rows of each session lie together, as far as its sessions were counted."""
        return self.first_break is None

    def to_json(self) -> dict[str, Any]:
        """JSON values; factors without bound are infinite."""
        value = {"version": _VERSION, "clustered": self.clustered, **asdict(self)}
        value["sessions"]["count"] = self.sessions.sessions
        for name in ("batches", "batches_by_session"):
            del value[name]["dedupe_factors"]  # stand with the features
        return value


_BATCH_SIZE_FROM: dict[BatchSizeFrom, str] = {
    "--batch-size": "as --batch-size says",
    "training.batch_size": "training.batch_size of the registry",
    "default": "--batch-size sets another size",
}


def findings(report: TableAnalysis) -> list[str]:
    """The outcome, a sentence or two each."""
    return [_size(report), _order(report), _duplication(report), _factors(report), _advice(report)]


def storage_rows(storage: StorageEstimate) -> Iterator[tuple[str, float]]:
    """What was stored or written how, and bytes of the features of a row."""
    if storage.stored is not None:
        yield "files as they are", storage.stored
    yield f"rewritten in this order ({storage.rows_as_read:,} rows written)", storage.as_read
    yield f"by session, list ({storage.rows_by_session:,} rows written)", storage.by_session
    yield "by session, list_dict (the same rows)", storage.by_session_dict


def session_rows(report: TableAnalysis) -> Iterator[tuple[str, float, float]]:
    """Numbers of samples, and the shares of sessions with so many in a partition and a batch."""
    partition, batch = report.sessions.histogram, report.batches.histogram
    all_partition, all_batch = sum(partition.values()), sum(batch.values())
    for size in sorted(partition.keys() | batch.keys()):
        label = str(size) if size <= 2 else f"{size // 2 + 1} to {size}"
        yield label, partition.get(size, 0) / all_partition, batch.get(size, 0) / all_batch


Headings = tuple[str, str, str]
Cells = list[tuple[str, str, str]]


def session_table(report: TableAnalysis) -> tuple[Headings, Cells]:
    """Return headings and rows of the table of sessions by their samples."""
    rows = session_rows(report)
    cells = [(label, share(partition), share(batch)) for label, partition, batch in rows]
    return ("samples", "in a partition", "in a batch"), cells


def storage_table(report: TableAnalysis) -> tuple[Headings, Cells]:
    """Return headings and rows of the table of storage."""
    rows = storage_rows(report.storage)
    cells = [(what, f"{size:,.0f}", bytes_text(size * report.rows)) for what, size in rows]
    return ("", "bytes a row", "table"), cells


def share(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.1f} %"


def factor(value: float) -> str:
    """A DedupeFactor."""
    return f"{value:.2f}" if math.isfinite(value) else "inf"


def _size(report: TableAnalysis) -> str:
    sessions = report.sessions
    about = "about " if sessions.rate < 1 else ""
    spread = f" (standard error {sessions.standard_error:.2g})" if sessions.rate < 1 else ""
    inside = "" if report.partitions == 1 else f" in {report.partitions:,} partitions"
    return (
        f"{report.rows:,} rows{inside} of {about}{sessions.sessions:,} sessions: "
        f"{sessions.samples_per_session:.2f} samples a session{spread}, median {sessions.median}, "
        f"longest {'seen ' if about else ''}{sessions.longest:,}. A batch of "
        f"{report.batch_size:,} ({_BATCH_SIZE_FROM[report.batch_size_from]}) has "
        f"{report.batches.samples_per_session:.2f} samples a session."
    )


def _order(report: TableAnalysis) -> str:
    sessions = report.sessions
    looked = "" if sessions.rate == 1 else f" (of {sessions.counted:,} sessions looked at)"
    if report.clustered:
        # The rule of three: what 95 of 100 samples would have shown.
        rare = f"; more than 1 torn one in {sessions.counted // 3:,} would show" if looked else ""
        return f"The table is clustered: the rows of each session lie together{looked}{rare}."
    sample = report.sample
    basis = (
        "all rows were put by session in memory"
        if sample.whole
        else f"{sample.sessions:,} sessions, {sample.rows:,} rows, were sampled"
    )
    return (
        f"The table is not clustered: {share(sessions.broken)} of its sessions are torn apart"
        f"{looked}, first seen in {report.first_break}. What it would be by session: {basis}."
    )


def _duplication(report: TableAnalysis) -> str:
    exact, partial = (_error(report, name, 100, 1) for name in ("exact", "partial"))
    return (
        f"Of the ids, {share(report.exact)}{exact} stand in rows that equal the row before in "
        f"their session (exact), and {share(report.partial)}{partial} stand in the row before too "
        "(partial)."
    )


def _factors(report: TableAnalysis) -> str:
    size = report.batches.rows // report.batches.batches
    by_session = ""
    if not report.clustered:
        error = _error(report, "factor_by_session", 1, 2)
        by_session = f", by session {factor(report.factor_by_session)}{error}"
    return (
        f"DedupeFactor over all features in batches of {size:,}: {factor(report.factor_as_is)} as "
        f"it is{by_session}; with partial deduplication {factor(report.partial_factor)}"
        f"{_error(report, 'partial_factor', 1, 2)}."
    )


def _advice(report: TableAnalysis) -> str:
    sample = report.sample
    if sample.too_small:
        return (
            "What pays is not told, as the sample is too small: into --sample-mb "
            f"{sample.megabytes} go {sample.rows:,} rows of {sample.sessions:,} of the sessions, "
            f"and advice takes {MIN_SESSIONS} sessions. Raise --sample-mb."
        )
    forms = [each.form for each in report.features]
    first = "" if report.clustered else "Cluster the table first (recd cluster). "
    if all(form == "plain" for form in forms):
        return "No feature repeats enough to be worth deduplicating (DedupeFactor 1.5)."
    return (
        f"{first}Of {len(forms)} features deduplicate {forms.count('exact')} exactly and "
        f"{forms.count('partial')} partially; {forms.count('plain')} stay plain."
    )


def _error(report: TableAnalysis, figure: str, scale: float, digits: int) -> str:
    """The standard error of a figure, where there is one."""
    error = report.sample.errors.get(figure)
    return f" (±{scale * error:.{digits}f})" if error else ""
