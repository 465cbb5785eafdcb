"""Writing files so that nobody ever sees half of one, and reading those that anyone may change."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recd_plugins.runtime.errors import RecdError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TOKEN_BYTES = 4
_STREAMS = ("stdin", "stdout", "stderr")
_OPEN_FILE = re.compile(
    rf"/dev/(?P<name>{'|'.join(_STREAMS)})|/(?:dev|proc/self)/fd/(?P<number>\d+)"
)


def json_text(value: Any) -> str:
    """JSON in lines. A number that JSON has no word for, NaN or infinite, becomes null."""
    return json.dumps(finite(value), indent=2, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write ``json_text`` of a value as ``write_text`` does."""
    write_text(path, json_text(value))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_note(path: Path, value: Any) -> None:
    """Write what this program itself will read again, with a digest of it; see ``write_json``."""
    write_json(path, {"sha256": _digest(value), "value": value})


def read_note(path: Path) -> Any:
    """What ``write_note`` wrote; None where it is not there, or was damaged or changed."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    is_note = isinstance(found, dict) and found.keys() == {"sha256", "value"}
    return found["value"] if is_note and found["sha256"] == _digest(found["value"]) else None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; missing folders are made.

    Raises:
        RecdError: the place cannot be written.
    """
    with new_file(path) as temporary:
        # Names of files that are not UTF-8 are written as the bytes that they are.
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")


def write_figure(path: Path, figure: Figure, *, dpi: int = 100) -> None:
    """Write a picture, in the format that the suffix says (``.png``, ``.svg``...), likewise.

    Raises:
        RecdError: the place cannot be written, or matplotlib knows no such format.
    """
    try:
        with new_file(path) as temporary:
            figure.savefig(temporary, format=path.suffix.removeprefix("."), dpi=dpi)
    except ValueError as error:
        raise RecdError(f"{path}: cannot be written ({error})") from error


@contextmanager
def new_file(path: Path, *, token: str = "", replaces: bool = True) -> Iterator[Path]:
    """A path to write, which becomes ``path`` at the end, and is gone where writing fails.

    Missing folders are made, and are gone again where writing fails. Where ``path`` is a link it
    stays one, to what is new. A pipe or a device stays what it is, and gets what was written.

    Args:
        path: the file.
        token: of ``without_remains``, where another process looks after this one.
        replaces: a file that is there at the end; else it is refused.

    Raises:
        RecdError: the place cannot be written, or there is a file that is not to be replaced.
    """
    if is_stream(path):
        with _streamed(path) as temporary:
            yield temporary
        return
    target = real_path(path)
    temporary = _temporary(target, token or secrets.token_hex(_TOKEN_BYTES))
    try:
        missing = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Opened as any other file, so that it gets the permissions that the umask leaves.
            with _marked(temporary) if token else nullcontext():
                yield temporary
                if not replaces and target.exists():
                    raise RecdError(f"{path}: another program has written it meanwhile; it stays")
                os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            _remove_empty(missing)
            raise
    except OSError as error:
        raise RecdError(f"{path}: cannot be written ({why_not(error, path)})") from error


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, up to one in which there is something."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def without_remains(path: Path) -> Iterator[str]:
    """A token for ``new_file`` in a process that may be killed: its file is gone if this fails.

    What is left of earlier ones, where this was killed too, is removed first. On file systems
    without locks it stays.
    """
    target, token = real_path(path), secrets.token_hex(_TOKEN_BYTES)
    tokens = "[0-9a-f]" * 2 * _TOKEN_BYTES
    for found in target.parent.glob(glob.escape(f".{target.name}.") + tokens):
        with suppress(OSError), found.open("r+b") as left:
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.unlink()
    try:
        yield token
    except BaseException:
        _temporary(target, token).unlink(missing_ok=True)
        raise


@contextmanager
def _marked(temporary: Path) -> Iterator[None]:
    """A context in which a file that is written is told from one that a killed process left."""
    with temporary.open("xb") as mark:
        with suppress(OSError):
            fcntl.flock(mark, fcntl.LOCK_EX)
        yield


def is_stream(path: Path) -> bool:
    """Return whether a path is a pipe, a device or an open file of this process."""
    return _open_file(path) is not None or _is_special(path)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _open_file(path: Path) -> int | None:
    """Its number, where a path names it."""
    named = _OPEN_FILE.fullmatch(os.path.abspath(path))
    return int(named["number"] or _STREAMS.index(named["name"])) if named else None


@contextmanager
def _streamed(path: Path) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder) / "written"
            yield temporary
            if (number := _open_file(path)) is not None:
                sys.stdout.flush()
                handle = os.dup(number)
            else:  # of a pipe that nobody reads an error, where it would wait without a word
                handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                os.set_blocking(handle, True)
            with open(handle, "wb") as stream, temporary.open("rb") as written:
                shutil.copyfileobj(written, stream)
    except OSError as error:
        why = "nobody reads it" if error.errno == errno.ENXIO else error.strerror or error
        raise RecdError(f"{path}: cannot be written ({why})") from error


def _temporary(path: Path, token: str) -> Path:
    return path.with_name(f".{path.name}.{token}")


def why_not(error: OSError, path: Path) -> str:
    """Why a file cannot be written; where the disk is full, with the bytes that are free."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error.strerror or str(error)
    while not path.exists():
        path = path.parent
    return f"{os.strerror(error.errno)}: {shutil.disk_usage(path).free:,} bytes are free"


def real_path(path: Path) -> Path:
    """``Path.resolve`` that takes a link to itself as it is: who opens it says what is wrong."""
    return Path(os.path.realpath(path))


def check_regular(path: Path) -> None:
    """Refuse what is opened for ever: a pipe that nobody writes to, or a device.

    Raises:
        OSError: it is no regular file; what is missing, or a folder, is left to who opens it.
    """
    if _is_special(path):
        raise OSError("it is no regular file, but a pipe or a device; write it to a file first")


def check_writable(path: Path) -> None:
    """See whether ``path`` can be written, before much work is done for it; nothing is left there.

    Raises:
        RecdError: it cannot.
    """
    if is_stream(path):
        return
    folder = real_path(path).parent
    while not folder.exists():
        folder = folder.parent
    try:
        if path.is_dir():
            raise IsADirectoryError("a directory")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecdError(f"{path}: cannot be written ({error.strerror or error})") from error


def _digest(value: Any) -> str:
    text = json.dumps(finite(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def finite(value: Any) -> Any:
    """A JSON value, with null for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
