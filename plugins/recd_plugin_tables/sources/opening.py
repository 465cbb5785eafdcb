"""Finds out what a location is, and opens it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from recd_plugin_tables.sources import delta, duckdb, hugging_face, iceberg, lance
from recd_plugin_tables.sources.columnar import ArrowFormat, ParquetFormat
from recd_plugin_tables.sources.file_format import FileFormat
from recd_plugin_tables.sources.files import FileSource
from recd_plugin_tables.sources.source import Source, SourceOptions
from recd_plugin_tables.sources.text import CsvFormat, JsonLinesFormat, TsvFormat
from recd_plugins.api import DataError
from recd_plugins.api.tables import Location

_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]*://")


def open_source(
    location: str | Path, format: str | None = None, options: SourceOptions | None = None
) -> Source:
    """The table at a place: a file, a folder of files or of a table format, a database, a URL.

    Args:
        location: a path or a URL.
        format: what it is; None goes by its name and content. Wins over that of ``options``.
        options: how it is opened.

    Raises:
        DataError: nothing is there, or nothing that can be read; says what.
        SetupError: the library for it is not installed, or its store cannot be reached.
    """
    options = options or SourceOptions()
    if format is not None:
        options = SourceOptions.model_validate({**dict(options), "format": format})
    root = Location(_place(location), options.storage)
    kind = options.format or _kind(root)
    if options.query is not None and kind != "duckdb":
        raise DataError(f"{root}: source.query is for DuckDB, and this is {kind or 'files'}")
    if kind in _LIBRARIES:
        return _LIBRARIES[kind](str(location), options)
    if options.table is not None:
        raise DataError(f"{root}: source.table is for tables of more than one, not for files")
    return _open_files(root, options)


def _kind(root: Location) -> str | None:
    """The format of a location that a library reads; None: of files."""
    place = str(root.path).rstrip("/")
    if place.startswith(hugging_face.SCHEME):
        return "huggingface"
    if place.startswith(iceberg.SCHEME):
        return "iceberg"
    if place.endswith((".duckdb", ".ddb")):
        return "duckdb"
    if place.endswith(".lance"):
        return "lance"
    if place.endswith(".metadata.json"):
        return "iceberg"
    if root.local is not None and not root.local.is_dir():
        return None
    marks = {name: kind for kind, names in _MARKS.items() for name in names if _has(root, name)}
    if "hudi" in marks.values():
        raise DataError(f"{root}: a Hudi table, which is not read; write its snapshot as Parquet")
    return next(iter(marks.values()), None)


def _has(root: Location, name: str) -> bool:
    """Whether a folder has a file or folder of this name."""
    if root.local is not None:
        return any(root.local.glob(name))
    folder, _, pattern = name.rpartition("/")
    inside = f"{str(root.path).rstrip('/')}/{folder or pattern}"
    try:
        found = Location(inside, root.storage).find("")
    except DataError:
        return False
    return not folder or any(str(file.path).endswith(pattern.lstrip("*")) for file in found)


def _place(location: str | Path) -> str | Path:
    return location if _URL.match(str(location)) else Path(location)


#: What opens tables that libraries read, by format.
_LIBRARIES: dict[str, Callable[[str, SourceOptions], Source]] = {
    "huggingface": lambda place, given: hugging_face.HuggingFaceSource(place, given.table),
    "iceberg": lambda place, _: iceberg.IcebergSource(place),
    "delta": lambda place, _: delta.DeltaSource(place),
    "lance": lambda place, _: lance.LanceSource(place),
    "duckdb": lambda place, given: duckdb.DuckDbSource(place, given.table, given.query),
}

# What the folders of formats hold, besides files of rows that would be read as if they were all.
_MARKS = {
    "delta": ["_delta_log"],
    "iceberg": ["metadata/*.metadata.json"],
    "huggingface": ["dataset_dict.json", "state.json"],
    "lance": ["_versions"],
    "hudi": [".hoodie"],
}

#: What makes the format of files, by name.
_FORMATS: dict[str, Callable[[SourceOptions], FileFormat]] = {
    "parquet": lambda _: ParquetFormat(),
    "arrow": lambda _: ArrowFormat(),
    "csv": lambda given: CsvFormat(given.separator, given.header, given.types),
    "tsv": lambda given: TsvFormat(given.separator, given.header, given.types),
    "jsonl": lambda given: JsonLinesFormat(given.types),
}
_CLASSES: tuple[type[FileFormat], ...] = (
    ParquetFormat,
    CsvFormat,
    TsvFormat,
    JsonLinesFormat,
    ArrowFormat,
)


def _open_files(root: Location, options: SourceOptions) -> Source:
    files = root.find("")
    if options.format is not None:
        suffixes = next(each.suffixes for each in _CLASSES if each.name == options.format)
        chosen = [file for file in files if str(file.path).endswith(suffixes)]
        return FileSource(root, chosen or files, _FORMATS[options.format](options))
    by_format: dict[str, list[Location]] = {}
    for file in files:
        for each in _CLASSES:
            if str(file.path).lower().endswith(each.suffixes):
                by_format.setdefault(each.name, []).append(file)
    if not by_format:
        raise DataError(
            f"{root}: no name here shows a format ({files[0]}); set format: to one of "
            f"{', '.join(_FORMATS)}, or end names with {', '.join(c.suffixes[0] for c in _CLASSES)}"
        )
    if len(by_format) > 1:
        seen = [f"{name} ({found[0]})" for name, found in by_format.items()]
        raise DataError(f"{root}: files of more than one format: {', '.join(seen)}; set format:")
    ((name, found),) = by_format.items()
    return FileSource(root, found, _FORMATS[name](options))
