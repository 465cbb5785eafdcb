"""Traces in text files: numbers between white space, one trace or one a column; also gzip."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from recd_plugin_dlrm.trace.text_kernels import FINE, NO_NUMBER, OTHER_COLUMNS, parse_ids
from recd_plugins.api import DataError
from recd_plugins.api.files import check_regular

_BYTES = 1 << 23
_SHOWN = 40


def read_text(path: Path, columns: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    """The ids of a text file, piece by piece.

    Args:
        path: the file; gzip where it ends in .gz.
        columns: names of the numbers of a line; without any, lines mean nothing.

    Returns:
        int64 ``[n, columns]`` each, ``[n, 1]`` without columns.

    Raises:
        DataError: the file cannot be read, is damaged or has no numbers; something in it is no
            number, or a line has other columns.
    """
    any_ids = False
    lines = 0
    try:
        check_regular(path)
        with _open(path) as file:
            for text in _pieces(file, by_line=bool(columns)):
                ids = _parse(path, text, lines, columns)
                lines += text.count(b"\n")
                if len(ids):
                    any_ids = True
                    yield ids
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except EOFError as error:
        raise DataError(
            f"{path}: the gzip file is truncated, it ends after line {lines:,}; fetch it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: no gzip file, or a damaged one: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not any_ids:
        raise DataError(f"{path}: there are no ids in it")


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _pieces(file: BinaryIO, *, by_line: bool) -> Iterator[bytes]:
    """The text in pieces that end where a number ends, or a line."""
    waiting = b""
    while more := file.read(_BYTES):
        text = waiting + more
        ends = (b"\n",) if by_line else (b"\n", b" ", b"\t", b"\r")
        cut = max(text.rfind(end) for end in ends) + 1
        if cut:
            yield text[:cut]
        waiting = text[cut:]
    if waiting:
        yield waiting


def _parse(path: Path, text: bytes, lines: int, columns: Sequence[str]) -> NDArray[np.int64]:
    out = np.empty((len(text) + 1) // 2, np.int64)
    num, wrong, place = parse_ids(np.frombuffer(text, np.uint8), len(columns), out)
    if wrong == FINE:
        return out[:num].reshape(-1, max(1, len(columns)))
    line_number = lines + text.count(b"\n", 0, place) + 1
    where = f"{path}: line {line_number:,}"
    if wrong == OTHER_COLUMNS:
        line = text[text.rfind(b"\n", 0, place) + 1 : place + 1]
        raise DataError(
            f"{where} has {len(line.split())} numbers, and --columns names {len(columns)}: "
            f"{', '.join(columns)}"
        )
    word = re.split(rb"\s", text[place : place + _SHOWN], maxsplit=1)[0]
    value = word.decode(errors="replace")
    if wrong == NO_NUMBER:
        raise DataError(
            f"{where}: {value!r} is no id; a trace has whole numbers with white space between them"
        )
    raise DataError(f"{where}: {value} does not fit into 64 bits; hash such ids before")
