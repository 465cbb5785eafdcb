"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import json
import math
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recd_plugins.errors import RecdError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def json_text(value: Any) -> str:
    """JSON in lines. A number that JSON has no word for, NaN or infinite, becomes null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write ``json_text`` of a value as ``write_text`` does."""
    write_text(path, json_text(value))


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; missing folders are made.

    Raises:
        RecdError: the place cannot be written.
    """
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


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
def new_file(path: Path) -> Iterator[Path]:
    """A path to write, which becomes ``path`` at the end, and is gone where writing fails.

    Missing folders are made; a file that is there is replaced.

    Raises:
        RecdError: the place cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Opened as any other file, so that it gets the permissions that the umask leaves.
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RecdError(f"{path}: cannot be written ({error.strerror or error})") from error


def check_writable(path: Path) -> None:
    """See whether ``path`` can be written, before much work is done for it; nothing is left there.

    Raises:
        RecdError: it cannot.
    """
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    try:
        if path.is_dir():
            raise IsADirectoryError("a directory")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecdError(f"{path}: cannot be written ({error.strerror or error})") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
