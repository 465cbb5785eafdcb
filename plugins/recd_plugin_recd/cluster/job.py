"""Runs ``recd cluster``: sorts each partition, then replaces the target atomically."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    SessionTable,
    check_target,
    open_source,
    plain_sessions,
)
from recd_plugins.api import DataError, file_utils, folders, parquet, text_utils

#: Version of the scratch files. A run does not resume work of another version.
_VERSION = 3


@dataclass(frozen=True)
class ClusteringReport:
    """Statistics of a run of ``recd cluster``.

    Attributes:
        rows, sessions: number of rows and of sessions in the output. A session in several
            partitions counts once in each.
        bytes_in, bytes_out: size of the input and output files; ``bytes_in`` is None if the source
            is a registry file.
    """

    source: str
    target: str
    files: int
    rows: int
    sessions: int
    samples_per_session: float
    bytes_in: int | None
    bytes_out: int
    seconds: float

    def __str__(self) -> str:
        before = "" if self.bytes_in is None else f"{text_utils.bytes_text(self.bytes_in)} -> "
        return (
            f"{self.target}: {self.rows:,} rows, {self.sessions:,} sessions, "
            f"{self.samples_per_session:.2f} rows per session\n"
            f"{before}{text_utils.bytes_text(self.bytes_out)} in {self.files} files, "
            f"{self.seconds:.1f} s"
        )


def cluster(
    options: ClusterOptions,
    *,
    force: bool = False,
    plugins_dir: Path | None = None,
    open_table: Callable[..., SessionTable] = open_source,
    start: Callable[[int | None], Progress] = lambda _rows: lambda _read, _written: None,
    say: Callable[[str], None] = lambda _line: None,
) -> ClusteringReport:
    """Sort the rows of ``options.source`` by session and time into ``options.target``.

    Args:
        options: source, target and how to sort.
        force: whether to replace ``target`` if it is a table.
        plugins_dir: folder of plugin files that a registry file needs.
        open_table: opens the source, with the arguments of ``open_source``.
        start: called with the number of rows, or None if unknown. Returns a function that receives
            the numbers of newly read and written rows.
        say: called with a message about whether an earlier run is resumed.

    Raises:
        DataError: the source cannot be sorted, or the target cannot be written.
    """
    began = time.monotonic()
    check_target(options.source, options.target, force)
    source = open_table(
        options.source,
        session=options.session,
        timestamp=options.timestamp,
        plugins_dir=plugins_dir,
    )
    _check_columns(source)
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
            raise DataError(
                f"{options.source}: there are no rows to write. Use another source, or raise "
                "--downsample-sessions."
            )
        report = _report(source, options, work.table, time.monotonic() - began)
        work.publish(options.target)
    return report


def _check_columns(source: SessionTable) -> None:
    """Raise DataError if the session or time column has a type that cannot be sorted."""
    keys, files = source.keys, source.partitions[0].files
    path = files[0] if files else source.path
    if keys.session == keys.timestamp:
        raise DataError(
            f"{path}: column {keys.session!r} cannot be both the session and the time. Use two "
            "different columns in --session and --timestamp."
        )
    try:
        plain_sessions(pa.array([], source.schema.field(keys.session).type))
    except DataError as error:
        raise DataError(f"{path}: column {keys.session!r}: {error}") from error
    kind = source.schema.field(keys.timestamp).type
    if not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_timestamp(kind)):
        raise DataError(
            f"{path}: time column {keys.timestamp!r} has the type {kind}. Set --timestamp to a "
            "column of timestamps or numbers."
        )


def _identity(source: SessionTable, options: ClusterOptions) -> dict[str, Any]:
    """Return JSON values of input and options. A killed run resumes only if they are the same."""
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
    stored = [file for partition in source.partitions for file in partition.files]
    return ClusteringReport(
        source=str(options.source),
        target=str(options.target),
        files=len(files),
        rows=statistics.rows,
        sessions=statistics.sessions,
        samples_per_session=statistics.samples_per_session,
        bytes_in=sum(file.stat().st_size for file in stored) if stored else None,
        bytes_out=sum(file.stat().st_size for file in files),
        seconds=seconds,
    )
