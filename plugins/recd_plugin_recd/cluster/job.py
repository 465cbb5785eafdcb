"""One run of ``recd cluster``: from a source to a whole table, or to none."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from recd_plugin_recd.cluster.options import ClusterOptions, Progress
from recd_plugin_recd.cluster.sort import Layouts, sort_partition
from recd_plugin_recd.cluster.spark import SparkEngine, stop_session
from recd_plugin_recd.sessions import plain_sessions
from recd_plugin_recd.source import ParquetSource, SessionTable, open_source
from recd_plugins.api import (
    DataError,
    bytes_text,
    machine_start,
    read_footers,
    read_note,
    real_path,
    work_folder,
    write_note,
)

#: Raised when unfinished work of another version cannot be gone on from.
_VERSION = 2
_HEAVIEST = 5


@dataclass(frozen=True)
class ClusteringReport:
    """Figures of one run.

    Attributes:
        rows, sessions: of the output; a session counts once in each partition.
        bytes_in, bytes_out: of the files; ``bytes_in`` is None if a dataset was read.
        dedupe_factors: of the features with the most ids.
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
        before = "" if self.bytes_in is None else f"{bytes_text(self.bytes_in)} -> "
        lines = [
            f"{self.target}: {self.rows:,} rows, {self.sessions:,} sessions, "
            f"{self.samples_per_session:.2f} rows a session",
            f"{before}{bytes_text(self.bytes_out)} in {self.files} files, {self.seconds:.1f} s, "
            f"peak memory {bytes_text(self.peak_memory)} of {bytes_text(self.memory)}",
        ]
        if self.dedupe_factors:
            factors = (f"{name} {factor:.2f}" for name, factor in self.dedupe_factors.items())
            lines.append(f"DedupeFactor: {', '.join(factors)}")
        return lines


def cluster(
    options: ClusterOptions,
    *,
    force: bool = False,
    plugins_dir: Path | None = None,
    start: Callable[[int | None], Progress] = lambda _rows: lambda _read, _written: None,
    say: Callable[[str], None] = lambda _line: None,
) -> ClusteringReport:
    """Sort ``options.source`` into the new folder ``options.target``.

    Args:
        force: replace the target if it is a table.
        start: called with the number of rows, if that is known; returns the progress callback.
        say: called with a line about how the run begins.
    """
    began = time.monotonic()
    _check_target(options, force)
    source = open_source(
        options.source,
        session=options.session,
        timestamp=options.timestamp,
        plugins_dir=plugins_dir,
    )
    check_columns(source)
    with work_folder(options.target, "recd-cluster", _identity(source, options), say) as work:
        progress = start(source.num_rows)
        layouts: Layouts | None = read_note(work.path / "layouts.json")
        # Files outside of Hive folders come first: the others are folders inside of theirs.
        for partition in sorted(source.partitions, key=lambda one: one.name):
            folder = work.table / partition.name
            if folder.exists():  # an earlier run finished it
                progress(partition.num_rows or 0, partition.num_rows or 0)
                continue
            scratch = work.path / "partition"
            shutil.rmtree(scratch, ignore_errors=True)
            if options.engine == "spark":
                engine = SparkEngine(source, partition, options, scratch)
                parts, layouts = engine.run(layouts, progress)
            else:
                parts, layouts = sort_partition(
                    source, partition, options, scratch, layouts, progress
                )
            write_note(work.path / "layouts.json", layouts)
            if any(parts.iterdir()):
                folder.parent.mkdir(parents=True, exist_ok=True)
                parts.rename(folder)
        if not work.table.exists():
            advice = "give --downsample-sessions more" if source.num_rows else "it has none"
            raise DataError(f"{options.source}: no row to write; {advice}")
        report = _report(source, options, work.table, time.monotonic() - began)
        if options.engine == "spark":
            stop_session()
        work.publish(options.target)
    return report


def check_columns(source: SessionTable) -> None:
    """Refuse sessions and times of types that cannot be sorted."""
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
    """Return what must be the same for a run to go on from another's work."""
    names = {"source": str(options.source), "target": str(options.target)}
    content: Any = uuid.uuid4().hex  # of a dataset nothing is known: each run is new
    if isinstance(source, ParquetSource):
        content = [
            [*entry, file.stat().st_size, file.stat().st_mtime_ns]
            for entry, file in zip(source.table.identity(), source.table.files, strict=True)
        ]
    return {
        "version": _VERSION,
        "machine": machine_start(),
        "options": {**asdict(options), **names},
        "input": content,
    }


def _check_target(options: ClusterOptions, force: bool) -> None:
    source, target = real_path(options.source), real_path(options.target)
    if target == source or source in target.parents or target in source.parents:
        raise DataError(f"{options.target} and {options.source} lie in each other; name another")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise DataError(f"{options.target} exists already; name another, or replace it by --force")
    strange = [
        file
        for file in [target, *target.rglob("*")]
        if file.is_file() and file.suffix != ".parquet" and not file.name.startswith(("_", "."))
    ]
    if target.is_file() or strange:
        name = target.name if target.is_file() else strange[0].name
        raise DataError(f"{options.target} is no table, it holds {name}; remove it yourself")


def _report(
    source: SessionTable, options: ClusterOptions, table: Path, seconds: float
) -> ClusteringReport:
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
        peak_memory=_peak_resident(),
        seconds=seconds,
    )


def _peak_resident() -> int:
    """Return the most memory of this process and its children, such as Spark's."""
    import psutil

    processes = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    try:
        return sum(map(_high_water, processes))
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _high_water(process: int) -> int:
    """Unlike ru_maxrss this leaves out the process that started this one."""
    with open(f"/proc/{process}/status", encoding="ascii") as lines:
        found = next((line for line in lines if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(found.split()[1]) * 1024
