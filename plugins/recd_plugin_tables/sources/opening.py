"""Opens a location by the format that it is of."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

from recd_plugin_tables.sources import delta, duckdb, hugging_face, iceberg, lance
from recd_plugin_tables.sources.columnar import ArrowFormat, ParquetFormat
from recd_plugin_tables.sources.file_format import FileFormat
from recd_plugin_tables.sources.files import FileSource
from recd_plugin_tables.sources.kind import find_kind
from recd_plugin_tables.sources.source import Source, SourceOptions
from recd_plugin_tables.sources.text import CsvFormat, JsonLinesFormat, TsvFormat
from recd_plugins.api import DataError, Location

_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]*://")


def open_source(
    location: str | Path,
    format: str | None = None,
    options: SourceOptions | None = None,
    *,
    of_another: bool = False,
    texts: Collection[str] = (),
) -> Source:
    """The table at a place: a file, a folder of files or of a table format, a database, a URL.

    Args:
        location: a path or a URL.
        format: what it is; None goes by that of ``options``, or by its name and content.
        options: how it is opened.
        of_another: the options are for another table: what is not for this one is left out.
        texts: columns that are text there, and here too where words could be taken for numbers.

    Raises:
        DataError: nothing is there, or nothing that can be read; says what.
        SetupError: the library for it is not installed, or its store cannot be reached.
    """
    options = options or SourceOptions()
    place = location if _URL.match(str(location)) else Path(location)
    root = Location(place, options.storage)
    kind, files = find_kind(root, format or options.format, of_another=of_another)
    for name in sorted(options.said() - {"format"} - _TAKES[kind]):
        if not of_another:
            takers = [each for each, names in _TAKES.items() if name in names]
            raise DataError(
                f"{root}: source.{name} is for {', '.join(takers)}, and this is {kind}; leave it "
                "out"
            )
    if kind in _LIBRARIES:
        return _LIBRARIES[kind](str(location), options)
    form = _FILES[kind](options, () if of_another else tuple(options.types), texts)
    return FileSource(root, files, form, texts)


def has_local_files(location: str | Path, options: SourceOptions) -> bool:
    """Return whether a location holds local files in a format that Arrow reads.

    Opens no file: only names are looked at.

    Raises:
        DataError: nothing is there, or no name shows a format.
    """
    if _URL.match(str(location)):
        return False
    return find_kind(Location(Path(location)), options.format)[0] in _FILES


#: What opens tables that libraries read.
_LIBRARIES: dict[str, Callable[[str, SourceOptions], Source]] = {
    "huggingface": lambda place, given: hugging_face.HuggingFaceSource(place, given.table),
    "iceberg": lambda place, _: iceberg.IcebergSource(place),
    "delta": lambda place, _: delta.DeltaSource(place),
    "lance": lambda place, _: lance.LanceSource(place),
    "duckdb": lambda place, given: duckdb.DuckDbSource(place, given.table, given.query),
}

#: What reads files, of the options, the columns that have to be there, and those that are text.
_FILES: dict[str, Callable[[SourceOptions, Collection[str], Collection[str]], FileFormat]] = {
    "parquet": lambda *_: ParquetFormat(),
    "arrow": lambda *_: ArrowFormat(),
    "csv": lambda given, needed, texts: _lines(CsvFormat, given, needed, texts),
    "tsv": lambda given, needed, texts: _lines(TsvFormat, given, needed, texts),
    "jsonl": lambda given, _, texts: JsonLinesFormat(given.types, texts),
}


def _lines(
    form: type[CsvFormat], given: SourceOptions, needed: Collection[str], texts: Collection[str]
) -> CsvFormat:
    types = {**dict.fromkeys(texts, "string"), **given.types}
    return form(given.separator, given.header, types, decimal=given.decimal, needed=needed)


# The options that formats take. Libraries reach their stores as their own settings say.
_TAKES: dict[str, set[str]] = {
    "parquet": {"storage"},
    "arrow": {"storage"},
    "csv": {"storage", "separator", "decimal", "header", "types"},
    "tsv": {"storage", "separator", "decimal", "header", "types"},
    "jsonl": {"storage", "types"},
    "huggingface": {"table"},
    "iceberg": set(),
    "delta": set(),
    "lance": set(),
    "duckdb": {"table", "query"},
}
