"""What a run did, in figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recd_plugin_recd.cluster.memory import peak_resident
from recd_plugin_recd.cluster.options import ClusterOptions
from recd_plugin_recd.source import SessionTable
from recd_plugins.api.tables import read_footers

_HEAVIEST = 5


@dataclass(frozen=True)
class ClusteringReport:
    """Figures of one run.

    Attributes:
        rows, sessions: of the output; a session counts once in each partition.
        samples_per_session: S.
        bytes_in, bytes_out: of the files; ``bytes_in`` is None where a dataset was read.
        dedupe_factors: of the features with the most ids, the one with most first.
        peak_memory: of the process so far, in bytes.
    """

    source: str
    target: str
    engine: str
    partitions: int
    files: int
    rows: int
    sessions: int
    samples_per_session: float
    bytes_in: int | None
    bytes_out: int
    dedupe_factors: dict[str, float]
    memory: int
    peak_memory: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report in lines for people."""
        before = "" if self.bytes_in is None else f"{_size(self.bytes_in)} -> "
        lines = [
            f"{self.target}: {self.rows:,} rows, {self.sessions:,} sessions, "
            f"{self.samples_per_session:.2f} rows a session",
            f"{before}{_size(self.bytes_out)} in {self.files} files, {self.seconds:.1f} s, "
            f"peak memory {_size(self.peak_memory)} of {_size(self.memory)}",
        ]
        if self.dedupe_factors:
            factors = (f"{name} {factor:.2f}" for name, factor in self.dedupe_factors.items())
            lines.append(f"DedupeFactor: {', '.join(factors)}")
        return lines


def make_report(
    source: SessionTable, options: ClusterOptions, table: Path, seconds: float
) -> ClusteringReport:
    """The report of the table that a run made, by the statistics in its footers."""
    files = sorted(table.rglob("*.parquet"))
    statistics = read_footers(files)
    assert statistics is not None, "TableWriter writes them"
    heaviest = sorted(statistics.features.items(), key=lambda item: -item[1].ids)[:_HEAVIEST]
    stored = [file for partition in source.partitions for file in partition.files]
    return ClusteringReport(
        source=str(options.source),
        target=str(options.target),
        engine=options.engine,
        partitions=len({file.parent for file in files}),
        files=len(files),
        rows=statistics.rows,
        sessions=statistics.sessions,
        samples_per_session=statistics.samples_per_session,
        bytes_in=sum(file.stat().st_size for file in stored) if stored else None,
        bytes_out=sum(file.stat().st_size for file in files),
        dedupe_factors={name: feature.dedupe_factor for name, feature in heaviest},
        memory=options.memory,
        peak_memory=peak_resident(),
        seconds=seconds,
    )


def _size(num_bytes: int) -> str:
    if num_bytes >= 10**9:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.1f} MB"
