"""Finds out what a location is, and opens it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

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
    return _open_files(root, options)


def _place(location: str | Path) -> str | Path:
    return location if _URL.match(str(location)) else Path(location)


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
