"""Where rows of a TSV file are: found by one pass over it, and kept beside the data."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from recd_plugin_dlrm.criteo.day import UNIT_ROWS
from recd_plugin_dlrm.criteo.tsv import BadLines, TsvStream
from recd_plugins.api import DataError, RecdError
from recd_plugins.api.files import read_note, write_note

_VERSION = 1


@dataclass(frozen=True)
class TsvIndex:
    """The index of one file.

    Attributes:
        size, mtime_ns: of the file when it was read.
        num_rows: lines but for bad ones.
        checksum: CRC-32 of the text, decompressed.
        offsets: where the lines of rows 0, ``UNIT_ROWS``, 2 * ``UNIT_ROWS``... start in the text.
        num_bad_lines: how many were passed over.
        bad_lines: what is wrong with the first of them.
    """

    size: int
    mtime_ns: int
    num_rows: int
    checksum: int
    offsets: list[int]
    num_bad_lines: int
    bad_lines: list[str]


def stamp(path: Path) -> tuple[int, int]:
    """Size and time of change.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return found.st_size, found.st_mtime_ns


def load_index(path: Path, cache: Path) -> TsvIndex | None:
    """The index that was kept of ``path`` as it is now, if there is one."""
    found = read_note(_place(path, cache))
    if found is None or (found.pop("version"), found.pop("unit_rows")) != (_VERSION, UNIT_ROWS):
        return None
    index = TsvIndex(**found)
    return index if (index.size, index.mtime_ns) == stamp(path) else None


def make_index(
    path: Path, cache: Path, bad_lines: BadLines, progress: Callable[[int], None]
) -> TsvIndex:
    """Read ``path``, which finds all that is wrong with it, and keep its index in ``cache``.

    Args:
        path: the file.
        cache: the folder.
        bad_lines: counts those of this file besides others.
        progress: takes rows done since the last call.

    Raises:
        DataError: a bad line too many, the file is damaged or empty, or changes meanwhile.
    """
    size, mtime_ns = stamp(path)
    checksum = 0

    def add(chunk: bytes) -> None:
        nonlocal checksum
        checksum = zlib.crc32(chunk, checksum)

    mine = bad_lines.of_one_file()
    offsets, num_rows = [], 0
    with TsvStream(path, mine, add) as stream:
        while True:
            offset = stream.offset
            rows = len(stream.read(UNIT_ROWS))
            if rows == 0:
                break
            offsets.append(offset)
            num_rows += rows
            progress(rows)
    if num_rows == 0:
        raise DataError(f"{path}: no rows in this file")
    if (size, mtime_ns) != stamp(path):
        raise DataError(f"{path} changes while it is read; wait until it is complete")
    index = TsvIndex(size, mtime_ns, num_rows, checksum, offsets, mine.count, mine.shown)
    try:
        write_note(
            _place(path, cache), {"version": _VERSION, "unit_rows": UNIT_ROWS, **asdict(index)}
        )
    except RecdError as error:
        raise DataError(f"{error}; option cache names another folder") from error
    return index


def _place(path: Path, cache: Path) -> Path:
    return cache / f"{path.name}.index.json"
