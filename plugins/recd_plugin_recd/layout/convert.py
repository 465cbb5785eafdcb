"""``recd convert-layout``: a table anew in another layout, with the same rows in the same order."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from recd_plugin_recd.source import ParquetSource
from recd_plugins.api import (
    DataError,
    Layout,
    Nulls,
    ParquetTable,
    Piece,
    TableWriter,
    put,
    read_metadata,
    real_path,
    scratch_folder,
)


@dataclass(frozen=True)
class Conversion:
    """What to make of which table.

    Attributes:
        source: a Parquet file or a folder of them.
        target: of the same kind; a folder keeps the names of files and of folders below it.
        layout: of the features.
        session, timestamp: columns of the source.
        row_group_rows: most rows of a row group.
        compression_level: of zstd.
        nulls: what becomes of a null in place of a list.
        popularity: a file with how often each feature is read, for the order of columns.
    """

    source: Path
    target: Path
    layout: Layout
    session: str = "session_id"
    timestamp: str = "ts"
    row_group_rows: int = 8192
    compression_level: int = 3
    nulls: Nulls = "error"
    popularity: Path | None = None


@dataclass(frozen=True)
class ConvertedTable:
    """What was written: rows, the layout of each feature, and bytes before and after."""

    rows: int
    layouts: dict[str, Layout]
    source_bytes: int
    target_bytes: int


def convert_layout(
    conversion: Conversion, *, force: bool, start: Callable[[int], Callable[[int], None]]
) -> ConvertedTable:
    """Write ``target``, which appears when it is complete.

    Args:
        conversion: from where to where.
        force: replace a target that is a table.
        start: gets the number of rows, and returns what gets how many more are written.
    """
    source, target = conversion.source, conversion.target
    _check_target(source, target, force)
    table = ParquetSource(source, conversion.session, conversion.timestamp)
    popularity: tuple[str, ...] = ()
    if conversion.popularity is not None:
        popularity = read_popularity(conversion.popularity, table.features)
    progress = start(table.num_rows or 0)
    with scratch_folder(target) as scratch:
        new = scratch / "table" / target.name
        layouts: Layout | dict[str, Layout] = conversion.layout
        for number in _in_order(table.table):
            file = table.table.files[number]
            path = new if source.is_file() else new / file.relative_to(source)
            with TableWriter(
                path,
                table.schema,
                keys=table.keys,
                layout=layouts,
                row_group_rows=conversion.row_group_rows,
                popularity=popularity,
                metadata=_metadata(file),
                nulls=conversion.nulls,
                compression_level=conversion.compression_level,
                source=file,
            ) as writer:
                _copy(table.table, number, writer, progress)
            layouts = writer.layouts
        written = _size([new] if source.is_file() else new.rglob("*.parquet"))
        put(new, target, scratch)
    assert not isinstance(layouts, str), "there is at least one file"
    return ConvertedTable(table.num_rows or 0, layouts, _size(table.table.files), written)


def _in_order(table: ParquetTable) -> list[int]:
    """All files; one with rows is first, because it decides on the layouts of all."""
    with_rows = {unit.file for unit in table.units}
    return sorted(range(len(table.files)), key=lambda number: number not in with_rows)


def _copy(
    table: ParquetTable, number: int, writer: TableWriter, progress: Callable[[int], None]
) -> None:
    pieces = (Piece(unit, 0, unit.num_rows) for unit in table.units if unit.file == number)
    for rows in table.read(pieces, table.schema):
        writer.write(rows.data)
        progress(len(rows))


def _metadata(file: Path) -> dict[bytes, bytes]:
    """What a file says of itself, but for pyarrow's own description of its columns."""
    found = read_metadata(file).metadata or {}
    return {key: value for key, value in found.items() if key != b"ARROW:schema"}


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _check_target(source: Path, target: Path, force: bool) -> None:
    inside, outside = real_path(target), real_path(source)
    if inside == outside or outside in inside.parents or inside in outside.parents:
        raise DataError(f"{target} and {source} lie in each other; write to another place")
    if not target.exists():
        return
    if not force:
        raise DataError(f"{target} exists already; remove it, write elsewhere, or give --force")
    if target.is_dir() != source.is_dir():
        raise DataError(f"{target} is not of the kind of {source}, file or folder; remove it")
    # What is replaced must be a table: a mistyped name costs no other data.
    ParquetTable(target)


def read_popularity(path: Path, features: Sequence[str]) -> tuple[str, ...]:
    """The features that ``path`` names, those that are read most first.

    ``path`` is a JSON object ``{"feature": count}``, or text with a line ``feature,count`` for
    each, which may begin with a header. Counts of a feature that stands there twice add up; equal
    counts keep the order of ``features``.
    """
    counts: dict[str, float] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    is_json = text.lstrip().startswith("{")
    pairs = _from_json(path, text) if is_json else _from_lines(path, text, features)
    for where, name, count in pairs:
        if name not in features:
            near = get_close_matches(name, features, n=1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(features)}"
            raise DataError(f"{where}: the table has no feature {name}; {advice}")
        if not 0 <= count < float("inf"):
            raise DataError(f"{where}: the count of {name} is {count}, expected 0 or more")
        counts[name] = counts.get(name, 0) + count
    if not counts:
        raise DataError(f"{path}: names no feature; there are {', '.join(features)}")
    return tuple(
        sorted((name for name in features if name in counts), key=lambda name: -counts[name])
    )


def _from_json(path: Path, text: str) -> Iterator[tuple[str, str, float]]:
    try:
        found = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no JSON: {error}") from error
    for name, count in found:
        if isinstance(count, bool) or not isinstance(count, int | float):
            raise DataError(f"{path}: the count of {name} is {count!r}, expected a number")
        yield str(path), name, count


def _from_lines(path: Path, text: str, features: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    for number, fields in enumerate(csv.reader(text.splitlines()), 1):
        if not fields:
            continue
        where = f"{path}:{number}"
        if len(fields) != 2:
            raise DataError(f"{where}: {','.join(fields)!r}; expected a feature, a comma, a count")
        name, count = (field.strip() for field in fields)
        try:
            yield where, name, float(count)
        except ValueError as error:
            # The first line may name the columns.
            if number > 1 or name in features:
                raise DataError(f"{where}: the count of {name} is {count!r}") from error
