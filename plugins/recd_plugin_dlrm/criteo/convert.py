"""``recd criteo convert``: converts Criteo's TSV files to Parquet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_dlrm.criteo.dataset import CACHE
from recd_plugin_dlrm.criteo.days import SCHEMA, UNIT_ROWS, DayFiles, find_days
from recd_plugin_dlrm.criteo.tsv import TsvStream, stamp
from recd_plugins.api import DataError, file_utils, folders, parquet_writer

_MARK = b"recd.criteo"
_VERSION = 1


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion from TSV to Parquet. Each output file has ``part_rows`` rows."""

    source: Path
    target: Path
    part_rows: int = 1 << 22
    row_group_rows: int = UNIT_ROWS


@dataclass
class ConvertedLogs:
    """Number of converted rows and files, with the input position from which to resume."""

    rows: int = 0
    part: int = 0
    offset: int = 0
    line: int = 1
    complete: bool = False


def convert(
    options: ConvertOptions,
    *,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
    start: Callable[[str, int | None], Callable[[int], None]] = lambda *_: lambda _: None,
) -> ConvertedLogs:
    """Convert Criteo's TSV files to Parquet, or resume a conversion that was killed.

    Args:
        options: options of the conversion; folder ``target`` appears only when it is complete.
        force: whether to overwrite a table that this command wrote.
        say: function that shows a message to the user.
        start: function that starts a progress bar, given a name and a number of rows. It returns a
            function that advances the bar.
    """
    days = find_days(options.source)
    for day in days:
        if not day.format.startswith("TSV"):
            raise DataError(
                f"{day.path}: the format is {day.format}, but this command converts only TSV. Use "
                "the files directly: set option 'path' of dataset 'dlrm.criteo' to this path."
            )
    _check_target(options.source, options.target, force)
    identity = _identity(options, days)
    with folders.work_folder(options.target, "recd-criteo", identity, say) as work:
        done = [_convert_day(day, options, work, start(day.name, None)) for day in days]
        if _identity(options, days) != identity:
            raise DataError(
                f"{options.source}: the source changed during the conversion. Run the command "
                "again when the source is complete."
            )
        work.publish(options.target)
    return ConvertedLogs(sum(each.rows for each in done), sum(each.part for each in done))


def _convert_day(
    day: DayFiles,
    options: ConvertOptions,
    work: folders.WorkFolder,
    progress: Callable[[int], None],
) -> ConvertedLogs:
    note = work.path / f"{day.name}.json"
    done = ConvertedLogs(**(file_utils.read_note(note) or {}))
    progress(done.rows)
    if done.complete:
        return done
    for left in (work.table / day.name).glob(".*.tmp"):
        left.unlink()
    with closing(TsvStream(day.path)) as stream:
        if done.offset:
            stream.seek(done.offset, done.line)
        while not done.complete:
            path = work.table / day.name / f"part-{done.part:05d}.parquet"
            rows = _write_part(path, stream, options, progress)
            if rows == 0:
                path.unlink()
            done = ConvertedLogs(
                done.rows + rows,
                done.part + (rows > 0),
                stream.offset,
                stream.line,
                complete=rows < options.part_rows,
            )
            if done.rows == 0:
                raise DataError(
                    f"{day.path}: the file has no rows. Remove the file or use another one."
                )
            file_utils.write_note(note, asdict(done))
    return done


def _write_part(
    path: Path, stream: TsvStream, options: ConvertOptions, progress: Callable[[int], None]
) -> int:
    """Write at most ``part_rows`` rows of a stream to a Parquet file, and return their number."""
    left = options.part_rows
    with parquet_writer.TableWriter(
        path,
        SCHEMA,
        keys=None,
        row_group_rows=options.row_group_rows,
        metadata={_MARK: str(_VERSION).encode()},
        source=path,
    ) as writer:
        while left and len(rows := stream.read(min(left, UNIT_ROWS))):
            columns = [rows.labels, *rows.dense, *rows.sparse]
            writer.write(pa.record_batch(list(map(pa.array, columns)), schema=SCHEMA))
            progress(len(rows))
            left -= len(rows)
    return options.part_rows - left


def _identity(options: ConvertOptions, days: list[DayFiles]) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "input": [[str(file_utils.real_path(day.path)), *stamp(day.path)] for day in days],
        "options": [options.part_rows, options.row_group_rows],
        "machine": folders.machine_start(),
    }


def _check_target(source: Path, target: Path, force: bool) -> None:
    """Reject a target folder that exists, unless ``force`` is set and this command wrote it."""
    if not target.exists():
        return
    if not force:
        raise DataError(f"{target}: the folder already exists. Use another folder or --force.")
    inner, outer = file_utils.real_path(source), file_utils.real_path(target)
    if outer in (inner, *inner.parents):
        raise DataError(
            f"{target}: --force would delete the source {source} inside this folder. Use another "
            "folder."
        )
    files = [path for path in target.rglob("*") if path.is_file() and path.parent.name != CACHE]
    if foreign := [path for path in files if not _is_ours(path)]:
        raise DataError(
            f"{target}: the folder contains {str(foreign[0].relative_to(target))!r}, which recd "
            "criteo convert did not write. Remove the folder or use another one."
        )


def _is_ours(path: Path) -> bool:
    try:
        return _MARK in (pq.read_metadata(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False
