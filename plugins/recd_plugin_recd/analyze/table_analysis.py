"""What ``recd analyze`` found, as it goes into JSON, a page and the terminal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from recd_plugin_recd.analyze.batch_meter import BatchSummary
from recd_plugin_recd.analyze.session_counts import SessionSummary
from recd_plugin_recd.analyze.session_sample import NUM_PARTS
from recd_plugin_recd.analyze.storage import StorageEstimate

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
