"""How much the lists of a table repeat: the characterisation of the RecD paper (section 3).

Statistics are sums over rows and over pairs of neighbouring rows of a session, so those of several
files add up to those of the table. Parquet files that a ``TableWriter`` made carry theirs in the
footer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recd_plugins.data.parquet import read_metadata
from recd_plugins.data.storage import Location
from recd_plugins.errors import DataError
from recd_plugins.files import parse_json
from recd_plugins.values.statistics import TableStatistics

#: Key of a Parquet footer under which a file carries its ``TableStatistics`` as JSON.
FOOTER_KEY = b"recd.statistics"


def read_footer(path: Path | Location) -> TableStatistics | None:
    """The statistics that a Parquet file carries, None where it carries none.

    Raises:
        DataError: it is no Parquet file, or its statistics cannot be read.
    """
    metadata = read_metadata(path).metadata or {}
    if FOOTER_KEY not in metadata:
        return None
    try:
        return TableStatistics.from_json(parse_json(metadata[FOOTER_KEY]))
    except ValueError as error:
        raise DataError(f"{path}: the statistics in its footer are damaged: {error}") from error


def read_footers(paths: Sequence[Path | Location]) -> TableStatistics | None:
    """The merged statistics of the files of a table, None where one of them carries none.

    Raises:
        DataError: a file is no Parquet file, or the files' features differ.
    """
    parts = [read_footer(path) for path in paths]
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return None
    for path, part in zip(paths, found, strict=True):
        if part.features.keys() != found[0].features.keys():
            raise DataError(f"{path}: the statistics have other features than those of {paths[0]}")
    return TableStatistics.merge(found)
