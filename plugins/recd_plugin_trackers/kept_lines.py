"""Files of lines that a run which goes on writes on to."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def set_aside(path: Path) -> None:
    """Rename a file of an earlier run, where there is one: ``run.csv`` to ``run.1.csv``."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    if path.exists():
        path.rename(aside)


def keep_lines(path: Path, count: int) -> None:
    """Leave the first so many lines of a file, and say on stderr where they are fewer."""
    from recd_plugins.api.files import write_text

    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < count:
        missing = count - len(whole)
        print(f"{path}: lacks {missing} lines of before the checkpoint", file=sys.stderr)
    write_text(path, "".join(whole[:count]))


def append(path: Path, text: str) -> None:
    """Write at the end, in one piece."""
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)


def sync(path: Path) -> None:
    """Have a file on disk, where there is one."""
    if path.exists():
        with path.open("rb") as file:
            os.fsync(file.fileno())
