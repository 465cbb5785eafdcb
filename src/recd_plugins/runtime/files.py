"""Writes files atomically, and stores JSON values with a checksum."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recd_plugins.runtime.errors import RecdError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def json_text(value: Any) -> str:
    """Return indented JSON. NaN and infinite numbers become null."""
    return json.dumps(finite(value), indent=2, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON. Replaces the file atomically."""
    write_text(path, json_text(value))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if the JSON is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def write_note(path: Path, value: Any) -> None:
    """Write a JSON value with its SHA-256 digest. Read it with ``read_note``."""
    write_json(path, {"sha256": _digest(value), "value": value})


def read_note(path: Path) -> Any:
    """Return the value written by ``write_note``. None if the file is missing or damaged."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    is_note = isinstance(found, dict) and found.keys() == {"sha256", "value"}
    return found["value"] if is_note and found["sha256"] == _digest(found["value"]) else None


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Raises RecdError if the file cannot be written."""
    with new_file(path) as temporary:
        # File names in the text may contain bytes that are not UTF-8.
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")


def write_figure(path: Path, figure: Figure, *, dpi: int = 100) -> None:
    """Write a matplotlib figure in the format of ``path``'s suffix. Raises RecdError on failure."""
    try:
        with new_file(path) as temporary:
            figure.savefig(temporary, format=path.suffix.removeprefix("."), dpi=dpi)
    except ValueError as error:
        raise RecdError(
            f"{path}: the file cannot be written ({error}). Use another path."
        ) from error


@contextmanager
def new_file(path: Path, *, token: str = "", replaces: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to. Renames the file to ``path`` if the context succeeds.

    If the context raises, the temporary file and new folders are removed. Missing folders are
    created. If ``path`` is a symbolic link, its target is replaced. If ``path`` is a pipe or a
    device, the content is copied to it. ``token``, from ``without_remains`` in another process, is
    part of the temporary file's name. ``replaces`` allows to replace an existing file.

    Raises:
        RecdError: the file cannot be written or must not be replaced.
    """
    target = real_path(path)
    temporary = _temporary(target, token or secrets.token_hex(4))
    try:
        if _is_stream(path):
            with _streamed(path) as temporary:
                yield temporary
            return
        missing = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            if not replaces and target.exists():
                raise RecdError(
                    f"{path}: another program wrote this file in the meantime, so the file was not "
                    "replaced. Use another path."
                )
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            with suppress(OSError):  # up to the first folder that is not empty
                for folder in missing:
                    folder.rmdir()
            raise
    except OSError as error:
        raise RecdError(
            f"{path}: the file cannot be written ({why_not(error, path)}). Use another path."
        ) from error


@contextmanager
def without_remains(path: Path) -> Iterator[str]:
    """Yield a token for ``new_file`` in another process; on failure, remove that temporary file."""
    token = secrets.token_hex(4)
    try:
        yield token
    except BaseException:
        _temporary(real_path(path), token).unlink(missing_ok=True)
        raise


def _is_stream(path: Path) -> bool:
    return _open_file(path) is not None or _is_special(path)


def _open_file(path: Path) -> int | None:
    if str(path.parent) in ("/dev/fd", "/proc/self/fd"):
        return int(path.name)
    return {"/dev/stdout": 1, "/dev/stderr": 2}.get(str(path))


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def _streamed(path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / "written"
        yield temporary
        sys.stdout.flush()
        number = _open_file(path)
        target = path if number is None else os.dup(number)
        with open(target, "wb") as stream, temporary.open("rb") as written:
            shutil.copyfileobj(written, stream)


def _temporary(path: Path, token: str) -> Path:
    return path.with_name(f".{path.name}.{token}")


def why_not(error: OSError, path: Path) -> str:
    """Return the reason of an OSError as text. For a full disk, adds the number of free bytes."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error.strerror or str(error)
    while not path.exists():
        path = path.parent
    return f"{os.strerror(error.errno)}: {shutil.disk_usage(path).free:,} bytes are free"


def real_path(path: Path) -> Path:
    """Return the path with symbolic links resolved. Unlike ``Path.resolve``, never raises."""
    return Path(os.path.realpath(path))


def check_regular(path: Path) -> None:
    """Raise OSError if the path is a pipe or a device, which cannot be read like a file."""
    if _is_special(path):
        raise OSError("the path is a pipe or a device. Copy its content to a file first.")


def check_writable(path: Path) -> None:
    """Raise RecdError if the file cannot be written. Call it before long work."""
    if _is_stream(path):
        return
    folder = real_path(path).parent
    while not folder.exists():
        folder = folder.parent
    try:
        if path.is_dir():
            raise IsADirectoryError("the path is a directory")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecdError(
            f"{path}: the file cannot be written ({error.strerror or error}). Use another path."
        ) from error


def _digest(value: Any) -> str:
    text = json.dumps(finite(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def finite(value: Any) -> Any:
    """Return a copy of a JSON value in which null replaces NaN and infinite numbers."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
