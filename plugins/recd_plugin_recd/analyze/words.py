"""A report in sentences and figures, for the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Iterator

from recd_plugin_recd.analyze.storage import StorageEstimate
from recd_plugin_recd.analyze.table_analysis import MIN_SESSIONS, BatchSizeFrom, TableAnalysis

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


def share(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.1f} %"


def factor(value: float) -> str:
    """A DedupeFactor."""
    return f"{value:.2f}" if math.isfinite(value) else "inf"


def bytes_in_words(size: float) -> str:
    """A size with a unit, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB" if size < 1000 else f"{size:,.0f} TB"


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
