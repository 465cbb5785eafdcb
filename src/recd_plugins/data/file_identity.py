"""What a Parquet file was when a table was opened, so that another one in its place is noticed."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugins.data.storage import CHANGED, Location
from recd_plugins.errors import DataError

# What is read of a file's end at first, as pyarrow does.
_TAIL = 1 << 16
# After a footer: its length, and PAR1.
_ENDING = 8
_FOOTER = "footer"


def look_at(location: Location, source: pa.NativeFile) -> tuple[pq.FileMetaData, Location]:
    """The footer of an open file, and ``location`` with what tells the file from others.

    One request to a store for most files.

    Raises:
        DataError: it is another file than ``location`` says.
        pyarrow.ArrowException: it is no Parquet file.
    """
    seen = location.state_of(source)
    _check_same(location, dict(seen))
    footer = _footer(source)
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        _ = metadata.schema.to_arrow_schema().names
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"its footer is damaged: a name is no text ({error})") from error
    seen = (*seen, (_FOOTER, hashlib.sha256(footer).hexdigest()[:16]))
    _check_same(location, dict(seen))
    return metadata, replace(location, seen=seen)


def check_unchanged(location: Location, source: pa.NativeFile) -> None:
    """Refuse a file that was changed after ``look_at``.

    Args:
        location: of ``look_at``.
        source: the same open file, or one that was opened anew.

    Raises:
        DataError: says what changed.
    """
    _check_same(location, dict(location.state_of(source)))


def footer_digest(location: Location) -> str:
    """Sixteen hex digits that stand for the footer of a file that ``look_at`` saw."""
    return str(dict(location.seen)[_FOOTER])


def replaced(location: Location, what: str = "") -> DataError:
    """What to raise where a file is not the one that was looked at before."""
    return DataError(f"{location} was replaced while it was in use{what}; start anew")


def _check_same(location: Location, now: dict[str, str | int]) -> None:
    before = dict(location.seen)
    if not before and location.size is not None:
        before = {"size": location.size}
    changes = [
        f"its {name} was {_shown(name, before[name])} and is {_shown(name, value)}"
        for name, value in now.items()
        if before.get(name, value) != value
    ]
    if changes:
        raise replaced(location, f" ({', '.join(changes)})")


def _shown(name: str, value: str | int) -> str:
    if name != CHANGED:
        return str(value)
    moment = datetime.fromtimestamp(int(value) // 10**9, UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{int(value) % 10**9:09}"


def _footer(source: pa.NativeFile) -> bytes:
    """With what follows it."""
    size = source.size()
    tail: bytes = source.read_at(min(size, _TAIL), max(0, size - _TAIL))
    length = int.from_bytes(tail[-_ENDING:-4], "little") + _ENDING
    if len(tail) < length <= size:
        tail = source.read_at(length, size - length)
    return tail[-length:]
