"""``recd criteo convert``: TSV to Parquet, file by file and part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_dlrm.criteo.days import UNIT_ROWS, DayFiles, RawRows, find_days
from recd_plugin_dlrm.criteo.stored_days import SCHEMA
from recd_plugin_dlrm.criteo.tables import CACHE
from recd_plugin_dlrm.criteo.tsv import BadLinePolicy, BadLines, TsvStream, stamp
from recd_plugins.api import (
    DataError,
    TableWriter,
    WorkFolder,
    machine_start,
    read_note,
    real_path,
    work_folder,
    write_note,
)

_MARK = b"recd.criteo"
_VERSION = 1


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert, and how.

    Attributes:
        source: a TSV file, or a folder of them.
        target: the folder to make: in it a folder for each file of ``source``.
        part_rows: rows of a Parquet file; what a killed run has to do again at most.
        row_group_rows: rows of a row group.
        bad_lines, max_bad_lines: see ``BadLines``.
    """

    source: Path
    target: Path
    part_rows: int = 1 << 22
    row_group_rows: int = UNIT_ROWS
    bad_lines: BadLinePolicy = "error"
    max_bad_lines: int = 100


@dataclass
class _Done:
    """How far a file is: what comes next."""

    part: int = 0
    offset: int = 0
    line: int = 1
    rows: int = 0
    num_bad_lines: int = 0
    bad_lines: list[str] = field(default_factory=list)
    complete: bool = False


@dataclass(frozen=True)
class ConvertedLogs:
    """What was done."""

    rows: int
    files: int
    num_bad_lines: int
    bad_lines: list[str]


def convert(
    options: ConvertOptions,
    *,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
    start: Callable[[str, int | None], Callable[[int], None]] = lambda *_: lambda _: None,
) -> ConvertedLogs:
    """Convert; ``target`` appears when it is complete. A run that was killed is gone on from.

    Args:
        options: what and how.
        force: replace a table that this command wrote.
        say: takes lines that tell what happens.
        start: begins a file: takes its name and rows, which are not known before it was read;
            what it returns takes the rows done since the last call.

    Raises:
        DataError: the source is no TSV, a bad line too many, a damaged file, the target is there
            or cannot be written.
    """
    days = find_days(options.source)
    for day in days:
        if not day.format.startswith("TSV"):
            raise DataError(
                f"{day.path} is {day.format}; this command converts TSV, and dlrm.criteo reads "
                "the other formats as they are"
            )
    _check_target(options.source, options.target, force)
    with work_folder(options.target, "recd-criteo", _identity(options, days), say) as work:
        bad_lines = BadLines.of(options.bad_lines, options.max_bad_lines)
        done = [_convert_day(day, options, work, bad_lines, start(day.name, None)) for day in days]
        work.publish(options.target)
    return ConvertedLogs(
        sum(each.rows for each in done),
        sum(each.part for each in done),
        bad_lines.count,
        bad_lines.shown,
    )


def _convert_day(
    day: DayFiles,
    options: ConvertOptions,
    work: WorkFolder,
    bad_lines: BadLines,
    progress: Callable[[int], None],
) -> _Done:
    note = work.path / f"{day.name}.json"
    done = _load(note)
    mine = bad_lines.of_one_file()
    mine.add_known(done.num_bad_lines, done.bad_lines)
    progress(done.rows)
    if done.complete:
        return done
    for left in (work.table / day.name).glob(".*.tmp"):
        left.unlink()
    before = stamp(day.path)
    with TsvStream(day.path, mine) as stream:
        if done.offset:
            stream.seek(done.offset, done.line)
        while not done.complete:
            path = work.table / day.name / f"part-{done.part:05d}.parquet"
            rows = _write_part(path, stream, options, progress)
            if rows < options.part_rows:
                done.complete = True
            if rows == 0:
                path.unlink()
            done = _Done(
                done.part + (rows > 0),
                stream.offset,
                stream.line,
                done.rows + rows,
                mine.count,
                mine.shown,
                done.complete,
            )
            if done.rows == 0:
                raise DataError(f"{day.path}: no rows in this file")
            if stamp(day.path) != before:
                raise DataError(f"{day.path} changes while it is read; wait until it is complete")
            write_note(note, vars(done))
    return done


def _write_part(
    path: Path, stream: TsvStream, options: ConvertOptions, progress: Callable[[int], None]
) -> int:
    """Write one file of at most ``part_rows`` rows, and say how many there were."""
    left = options.part_rows
    with TableWriter(
        path,
        SCHEMA,
        keys=None,
        row_group_rows=options.row_group_rows,
        metadata={_MARK: str(_VERSION).encode()},
        source=path,
    ) as writer:
        while left:
            rows = stream.read(min(left, UNIT_ROWS))
            if not len(rows):
                break
            writer.write(_record_batch(rows))
            progress(len(rows))
            left -= len(rows)
    return options.part_rows - left


def _record_batch(rows: RawRows) -> pa.RecordBatch:
    columns = [rows.labels, *rows.dense, *rows.sparse]
    return pa.record_batch([pa.array(column) for column in columns], schema=SCHEMA)


def _identity(options: ConvertOptions, days: list[DayFiles]) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "input": [[str(real_path(day.path)), *stamp(day.path)] for day in days],
        "options": [
            options.part_rows,
            options.row_group_rows,
            options.bad_lines,
            options.max_bad_lines,
        ],
        "machine": machine_start(),
    }


def _load(note: Path) -> _Done:
    return _Done(**(read_note(note) or {}))


def _check_target(source: Path, target: Path, force: bool) -> None:
    if not target.exists():
        return
    if not force:
        raise DataError(f"{target} is there already; name another folder, or add --force")
    inner, outer = real_path(source), real_path(target)
    if outer in (inner, *inner.parents):
        raise DataError(f"{source} lies in {target}, which is to be replaced; name another folder")
    files = [path for path in target.rglob("*") if path.is_file()] if target.is_dir() else []
    foreign = [path for path in files if not _is_ours(path)]
    if foreign or not files:
        holds = f", it holds {foreign[0].relative_to(target)}" if foreign else ""
        raise DataError(
            f"{target} was not written by recd criteo convert{holds}; remove it yourself"
        )


def _is_ours(path: Path) -> bool:
    if path.parent.name == CACHE:
        return True
    try:
        return _MARK in (pq.read_metadata(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False
