"""One run of ``recd cluster``: from a source to a whole table, or to none."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recd_plugin_recd.cluster.clustering_report import ClusteringReport, make_report
from recd_plugin_recd.cluster.embedded import EmbeddedEngine, run_budget
from recd_plugin_recd.cluster.keys import check_columns
from recd_plugin_recd.cluster.memory import Budget
from recd_plugin_recd.cluster.options import ClusterOptions, Progress
from recd_plugin_recd.cluster.spark import SparkEngine, stop_session
from recd_plugin_recd.source import ParquetSource, Partition, SessionTable, open_source
from recd_plugins.api import DataError
from recd_plugins.api.files import (
    WorkFolder,
    machine_start,
    read_note,
    real_path,
    work_folder,
    write_note,
)
from recd_plugins.api.tables import Layout

#: Raised when unfinished work of another version cannot be gone on from.
_VERSION = 1
_LAYOUTS = "layouts.json"


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
        start: called with the number of rows, if that is known; returns what is told of progress.
        say: called with a line about what is going on.

    Raises:
        DataError: the source is wrong, the target is there or cannot be written, memory is too
            small; nothing is written then.
        SetupError: the engine is not installed.
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
    budget = None if options.engine == "spark" else run_budget(source, options)
    with work_folder(options.target, "recd-cluster", _identity(source, options), say) as work:
        progress = start(source.num_rows)
        # That of files outside of Hive folders comes first: the others are folders inside of it.
        for number, partition in sorted(enumerate(source.partitions), key=lambda one: one[1].name):
            scratch = work.path / f"partition-{number}"
            _sort(source, partition, options, work, scratch, budget, progress)
        if not work.table.exists():
            advice = "give --downsample-sessions more" if source.num_rows else "it has none"
            raise DataError(f"{options.source}: no row to write; {advice}")
        report = make_report(source, options, work.table, time.monotonic() - began)
        if options.engine == "spark":
            stop_session()
        work.publish(options.target)
    return report


def _sort(
    source: SessionTable,
    partition: Partition,
    options: ClusterOptions,
    work: WorkFolder,
    scratch: Path,
    budget: Budget | None,
    progress: Progress,
) -> None:
    """Add one partition to the table, unless an earlier run did."""
    folder = work.table / partition.name
    if folder.exists():
        progress(partition.num_rows or 0, partition.num_rows or 0)
    else:
        layouts = work.path / _LAYOUTS
        known: dict[str, Layout] | None = read_note(layouts)
        engine: EmbeddedEngine | SparkEngine
        if budget is None:
            engine = SparkEngine(source, partition, options, scratch, known)
        else:
            engine = EmbeddedEngine(source, partition, options, scratch, known, budget)
        parts = engine.run(progress)
        if engine.layouts is not None:
            write_note(layouts, engine.layouts)
        if any(parts.iterdir()):
            folder.parent.mkdir(parents=True, exist_ok=True)
            parts.rename(folder)
    shutil.rmtree(scratch, ignore_errors=True)


def _identity(source: SessionTable, options: ClusterOptions) -> dict[str, Any]:
    """What must be the same for a run to go on from another's work."""
    return {
        "version": _VERSION,
        "machine": machine_start(),
        "options": options.identity(),
        "input": _content(source),
    }


def _content(source: SessionTable) -> Any:
    """What a changed input changes. What a dataset reads is not known: each of its runs is new."""
    if not isinstance(source, ParquetSource):
        return uuid.uuid4().hex
    return [
        [*entry, file.stat().st_size, file.stat().st_mtime_ns]
        for entry, file in zip(source.table.identity(), source.table.files, strict=True)
    ]


def _check_target(options: ClusterOptions, force: bool) -> None:
    source, target = real_path(options.source), real_path(options.target)
    if target == source or source in target.parents or target in source.parents:
        raise DataError(f"{options.target} and {options.source} lie in each other; name another")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise DataError(f"{options.target} exists already; name another, or replace it by --force")
    strange = [target] if target.is_file() else _strangers(target)
    if strange:
        raise DataError(
            f"{options.target} is no table, it holds {strange[0].name}; remove it yourself"
        )


def _strangers(folder: Path) -> list[Path]:
    """Files that are no part of a Parquet table."""
    return [
        file
        for file in folder.rglob("*")
        if file.is_file() and file.suffix != ".parquet" and not file.name.startswith(("_", "."))
    ]
