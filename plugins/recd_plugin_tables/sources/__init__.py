"""Table sources: files, table formats that libraries read, and databases."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

from recd_plugin_tables.sources import libraries
from recd_plugin_tables.sources.files import (
    ArrowFormat,
    FileFormat,
    FileSource,
    ParquetFormat,
)
from recd_plugin_tables.sources.source import Source, SourceOptions
from recd_plugin_tables.sources.text import CsvFormat, JsonLinesFormat, TsvFormat
from recd_plugins.api import DataError, object_stores

__all__ = ["Source", "SourceOptions", "has_local_files", "open_source"]

_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]*://")
_FORMATS: tuple[type[FileFormat], ...] = (
    ParquetFormat,
    CsvFormat,
    TsvFormat,
    JsonLinesFormat,
    ArrowFormat,
)
_FILES = tuple(each.name for each in _FORMATS)
# A folder that contains one of these is read by a library, not as a folder of files.
_MARKS = {
    "delta": ["_delta_log"],
    "iceberg": ["metadata/*.metadata.json"],
    "huggingface": ["dataset_dict.json", "state.json"],
    "lance": ["_versions"],
}
_LIBRARIES: dict[str, Callable[[str, SourceOptions], Source]] = {
    "huggingface": lambda place, given: libraries.HuggingFaceSource(place, given.table),
    "iceberg": lambda place, _: libraries.IcebergSource(place),
    "delta": lambda place, _: libraries.DeltaSource(place),
    "lance": lambda place, _: libraries.LanceSource(place),
    "duckdb": lambda place, given: libraries.DuckDbSource(place, given.table, given.query),
}


def open_source(
    location: str | Path,
    options: SourceOptions | None = None,
    *,
    of_another: bool = False,
    texts: Collection[str] = (),
) -> Source:
    """Open a table for reading.

    Args:
        location: a path or URL of a file, a folder of files, a table format or a database.
        options: how to open it.
        of_another: whether the options were written for another table and may not fit.
        texts: columns that are text even if they look like numbers or times.
    """
    options = options or SourceOptions()
    root = object_stores.Location(
        location if _URL.match(str(location)) else Path(location), options.storage
    )
    kind, files = _find_format(root, options.format, of_another=of_another)
    if options.query is not None and kind != "duckdb" and not of_another:
        raise DataError(
            f"{root}: source.query needs a DuckDB file, but the format is {kind}. Remove "
            "source.query."
        )
    if kind in _LIBRARIES:
        return _LIBRARIES[kind](str(location), options)
    needed = () if of_another else tuple(options.types)
    types = {**dict.fromkeys(texts, "string"), **options.types}
    form: FileFormat
    if kind == "jsonl":
        form = JsonLinesFormat(options.types, texts)
    elif kind in ("csv", "tsv"):
        form = (CsvFormat if kind == "csv" else TsvFormat)(
            options.separator, options.header, types, decimal=options.decimal, needed=needed
        )
    else:
        form = ParquetFormat() if kind == "parquet" else ArrowFormat()
    return FileSource(root, files, form, texts)


def has_local_files(location: str | Path, options: SourceOptions) -> bool:
    """Return whether a location has local files in a format that Arrow reads, judged by name."""
    if _URL.match(str(location)):
        return False
    return _find_format(object_stores.Location(Path(location)), options.format)[0] in _FILES


def _find_format(
    root: object_stores.Location, wanted: str | None, *, of_another: bool = False
) -> tuple[str, list[object_stores.Location]]:
    """Return the format of a location, and its files if Arrow reads the format."""
    found = _library_format(root)
    if found is not None:
        if wanted in (None, found) or of_another:
            return found, []
        raise DataError(
            f"{root}: this folder is a {found} table, whose files may contain deleted rows. Remove "
            f"format: {wanted}."
        )
    if wanted is not None and wanted not in _FILES and not of_another:
        return wanted, []
    files = root.find("")
    by_format: dict[str, list[object_stores.Location]] = {}
    for file in files:
        for each in _FORMATS:
            if str(file.path).lower().endswith(each.suffixes):
                by_format.setdefault(each.name, []).append(file)
    # The name of a table to score may show no format, or a misleading one, as in training.
    unnamed = not by_format and wanted in _FILES
    alike = wanted in ("csv", "tsv") and by_format.keys() <= {"csv", "tsv"}
    if wanted is not None and (not of_another or unnamed or alike):
        return wanted, by_format.get(wanted, files)
    if len(by_format) != 1:
        seen = [f"{name!r} ({of[0]})" for name, of in by_format.items()]
        what = (
            f"the files have different formats: {', '.join(seen)}"
            if seen
            else f"the suffix of {str(files[0]).rpartition('/')[2]!r} does not show a format"
        )
        how = (
            "Add dataset.options.source.format=FORMAT to the command, with one of"
            if of_another
            else "Set source.format (recd init: --format) to one of"
        )
        raise DataError(f"{root}: {what}. {how}: {', '.join(map(repr, _FILES))}.")
    ((kind, chosen),) = by_format.items()
    return kind, chosen


def _library_format(root: object_stores.Location) -> str | None:
    """Return the format of a folder that a library reads (Delta, Iceberg, ...), or None."""
    place = str(root.path).rstrip("/")
    if str(root.path).startswith(libraries.HUB):
        return "huggingface"
    if str(root.path).startswith(libraries.CATALOG) or place.endswith(".metadata.json"):
        return "iceberg"
    if place.endswith((".duckdb", ".ddb")):
        return "duckdb"
    if place.endswith(".lance"):
        return "lance"
    if root.local is not None and not root.local.is_dir():
        return None
    return next((kind for kind, names in _MARKS.items() for n in names if _has(root, n)), None)


def _has(root: object_stores.Location, name: str) -> bool:
    """Return whether a folder contains a file or folder of this name."""
    if root.local is not None:
        return any(root.local.glob(name))
    folder, _, pattern = name.rpartition("/")
    inside = f"{str(root.path).rstrip('/')}/{folder or pattern}"
    try:
        found = object_stores.Location(inside, root.storage).find("")
    except DataError:
        return False
    return not folder or any(str(file.path).endswith(pattern.lstrip("*")) for file in found)
