"""Runs ``recd cluster``, which writes its output atomically, and ``--check``."""

from __future__ import annotations

import re
import resource
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from recd_plugin_recd.cluster.sort import (
    ClusterOptions as ClusterOptions,
)
from recd_plugin_recd.cluster.sort import (
    Layouts,
    Progress,
    sort_partition,
)
from recd_plugin_recd.cluster.spark import sort_with_spark
from recd_plugin_recd.sessions import (
    ParquetSource,
    Partition,
    SessionTable,
    check_keys,
    check_target,
    open_source,
    plain_sessions,
    row_place,
    session_hashes,
)
from recd_plugins.api import DataError, file_utils, folders, parquet, text_utils

#: Version of the scratch files. A run does not resume work of another version.
_VERSION = 3
_HEAVIEST = 5


@dataclass(frozen=True)
class ClusteringReport:
    """Statistics of one run.

    Attributes:
        rows, sessions: row and session counts of the output. A session counts once in each
            partition.
        bytes_in, bytes_out: file sizes; ``bytes_in`` is None if a dataset was read.
        dedupe_factors: DedupeFactors of the features with the most ids.
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

    def lines(self) -> list[str]:
        """Return the report as text."""
        before = "" if self.bytes_in is None else f"{text_utils.bytes_text(self.bytes_in)} -> "
        factors = (f"{name} {factor:.2f}" for name, factor in self.dedupe_factors.items())
        return [
            f"{self.target}: {self.rows:,} rows, {self.sessions:,} sessions, "
            f"{self.samples_per_session:.2f} rows a session",
            f"{before}{text_utils.bytes_text(self.bytes_out)} in {self.files} files, "
            f"{self.seconds:.1f} s, "
            f"peak memory {text_utils.bytes_text(self.peak_memory)} of "
            f"{text_utils.bytes_text(self.memory)}",
            f"DedupeFactor: {', '.join(factors)}",
        ]


def cluster(
    options: ClusterOptions,
    *,
    force: bool = False,
    plugins_dir: Path | None = None,
    start: Callable[[int | None], Progress] = lambda _rows: lambda _read, _written: None,
    say: Callable[[str], None] = lambda _line: None,
) -> ClusteringReport:
    """Sort ``options.source`` into the new folder ``options.target``.

    ``start`` receives the number of rows, if known, and returns the progress callback. ``say``
    receives a line that says how the run starts.
    """
    began = time.monotonic()
    check_target(options.source, options.target, force)
    source = open_source(
        options.source,
        session=options.session,
        timestamp=options.timestamp,
        plugins_dir=plugins_dir,
    )
    check_columns(source)
    with folders.work_folder(
        options.target, "recd-cluster", _identity(source, options), say
    ) as work:
        progress = start(source.num_rows)
        layouts: Layouts | None = file_utils.read_note(work.path / "layouts.json")
        sort = sort_with_spark if options.engine == "spark" else sort_partition
        # Files outside of Hive folders come first, because those folders are inside theirs.
        for partition in sorted(source.partitions, key=lambda one: one.name):
            folder = work.table / partition.name
            if folder.exists():  # an earlier run finished this partition
                progress(partition.num_rows or 0, partition.num_rows or 0)
                continue
            scratch = work.path / "partition"
            shutil.rmtree(scratch, ignore_errors=True)
            parts, layouts = sort(source, partition, options, scratch, layouts, progress)
            file_utils.write_note(work.path / "layouts.json", layouts)
            if any(parts.iterdir()):
                folder.parent.mkdir(parents=True, exist_ok=True)
                parts.rename(folder)
        if not work.table.exists():
            raise DataError(f"{options.source}: no row to write")
        report = _report(source, options, work.table, time.monotonic() - began)
        work.publish(options.target)
    return report


def check_columns(source: SessionTable) -> None:
    """Reject session and time columns whose types cannot be sorted."""
    keys, files = source.keys, source.partitions[0].files
    path = files[0] if files else source.path
    if keys.session == keys.timestamp:
        raise DataError(f"{path}: {keys.session!r} cannot be both the session and the time")
    try:
        plain_sessions(pa.array([], source.schema.field(keys.session).type))
    except DataError as error:
        raise DataError(f"{path}: column {keys.session!r}: {error}") from error
    kind = source.schema.field(keys.timestamp).type
    if not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_timestamp(kind)):
        raise DataError(
            f"{path}: column {keys.timestamp!r} is {kind}; a time is a timestamp or a number"
        )


def _identity(source: SessionTable, options: ClusterOptions) -> dict[str, Any]:
    """Return the values that two runs must share for one to resume the other."""
    names = {"source": str(options.source), "target": str(options.target)}
    content: Any = uuid.uuid4().hex  # a dataset has no identity, so each run starts over
    if isinstance(source, ParquetSource):
        content = [
            [*entry, file.stat().st_size, file.stat().st_mtime_ns]
            for entry, file in zip(source.table.identity(), source.table.files, strict=True)
        ]
    return {
        "version": _VERSION,
        "machine": folders.machine_start(),
        "options": {**asdict(options), **names},
        "input": content,
    }


def _report(
    source: SessionTable, options: ClusterOptions, table: Path, seconds: float
) -> ClusteringReport:
    files = sorted(table.rglob("*.parquet"))
    statistics = parquet.read_footers(files)
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
        peak_memory=_peak_memory(),
        seconds=seconds,
    )


def _peak_memory() -> int:
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    # Unlike VmHWM, this includes the process that started this one.
    return int(found[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check_clustered(
    path: Path, session: str | None, timestamp: str | None, plugins_dir: Path | None
) -> dict[str, int]:
    """Check that each session's rows are adjacent and sorted by time.

    Returns:
        ``rows`` and ``sessions``. A session counts once in each partition.
    """
    source = open_source(path, session=session, timestamp=timestamp, plugins_dir=plugins_dir)
    check_columns(source)
    counts = [_check(source, partition) for partition in source.partitions]
    rows, sessions = (sum(each) for each in zip(*counts, strict=True))
    return {"rows": rows, "sessions": sessions}


def _check(source: SessionTable, partition: Partition) -> tuple[int, int]:
    keys = source.keys
    seen: set[int] = set()
    last: int | None = None
    last_time: Any = None
    num_rows = 0
    for rows in source.read(partition, [keys.session, keys.timestamp]):
        check_keys(rows, keys)
        if not len(rows):
            continue
        hashes = session_hashes(rows.data.column(keys.session))
        times = rows.data.column(keys.timestamp).to_numpy(zero_copy_only=False)
        starts = np.r_[int(hashes[0]) != last, hashes[1:] != hashes[:-1]]
        backwards = np.r_[last_time is not None and times[0] < last_time, times[1:] < times[:-1]]
        for row in np.flatnonzero(starts | backwards).tolist():
            wrong = ""
            if not starts[row]:
                wrong = "the time is before that of the row above, of the same session"
            elif int(hashes[row]) in seen:
                wrong = "its session was there before, and other sessions between"
            if wrong:
                raise DataError(f"{row_place(rows, row)}: {wrong}; sort the table by recd cluster")
            seen.add(int(hashes[row]))
        last, last_time = int(hashes[-1]), times[-1]
        num_rows += len(rows)
    return num_rows, len(seen)
