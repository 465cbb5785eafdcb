"""What a location is: a table of a format that a library reads, or files."""

from __future__ import annotations

from recd_plugin_tables.sources import hugging_face, iceberg
from recd_plugin_tables.sources.columnar import ArrowFormat, ParquetFormat
from recd_plugin_tables.sources.file_format import FileFormat, looks_like
from recd_plugin_tables.sources.text import CsvFormat, JsonLinesFormat, TsvFormat
from recd_plugins.api import DataError, Location

#: The formats of files.
FILE_FORMATS: tuple[type[FileFormat], ...] = (
    ParquetFormat,
    CsvFormat,
    TsvFormat,
    JsonLinesFormat,
    ArrowFormat,
)
_FILES = tuple(each.name for each in FILE_FORMATS)

# What the folders of formats hold, besides files of rows that would be read as if they were all.
_MARKS = {
    "delta": ["_delta_log"],
    "iceberg": ["metadata/*.metadata.json"],
    "huggingface": ["dataset_dict.json", "state.json"],
    "lance": ["_versions"],
}


def find_kind(
    root: Location, wanted: str | None, *, of_another: bool = False
) -> tuple[str, list[Location]]:
    """The format of a location, and its files where it is one of files.

    Args:
        root: the location.
        wanted: the format that a user says; None goes by name and content.
        of_another: it was said of another table: names go before it, unless the content shows it.

    Raises:
        DataError: nothing is there, nothing shows a format, or it is another than the wanted one.
    """
    found = _of_library(root)
    if found is not None:
        if wanted in (None, found) or of_another:
            return found, []
        raise DataError(
            f"{root}: this is a table of {found}, whose files may hold rows that are not in it any "
            f"more; leave format: {wanted} out"
        )
    if wanted is not None and wanted not in _FILES and not of_another:
        return wanted, []
    files = root.find("")
    by_format: dict[str, list[Location]] = {}
    for file in files:
        for each in FILE_FORMATS:
            if str(file.path).lower().endswith(each.suffixes):
                by_format.setdefault(each.name, []).append(file)
    if wanted is not None and (not of_another or not by_format or looks_like(files[0]) == wanted):
        return wanted, by_format.get(wanted, files)
    if not by_format:
        suffixes = ", ".join(each.suffixes[0] for each in FILE_FORMATS)
        raise DataError(
            f"{root}: no name here shows a format ({files[0]}); set format: (recd init: "
            f"--format) to one of {', '.join(_FILES)}, or end names with {suffixes}"
        )
    if len(by_format) > 1:
        seen = [f"{name} ({found[0]})" for name, found in by_format.items()]
        raise DataError(
            f"{root}: files of more than one format: {', '.join(seen)}; set format: "
            "(recd init: --format)"
        )
    ((kind, chosen),) = by_format.items()
    return kind, chosen


def _of_library(root: Location) -> str | None:
    """The format that a library reads; None: files."""
    if str(root.path).startswith(hugging_face.SCHEME):
        return "huggingface"
    place = str(root.path).rstrip("/")
    if str(root.path).startswith(iceberg.SCHEME) or place.endswith(".metadata.json"):
        return "iceberg"
    if place.endswith((".duckdb", ".ddb")):
        return "duckdb"
    if place.endswith(".lance"):
        return "lance"
    if root.local is not None and not root.local.is_dir():
        return None
    return next((kind for kind, names in _MARKS.items() for n in names if _has(root, n)), None)


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
