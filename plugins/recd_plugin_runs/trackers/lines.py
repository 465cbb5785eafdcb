"""Files of lines that a run which goes on writes on to."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from pydantic import Field

from recd_plugin_runs.trackers.tracker import LocalPath, Tracker, TrackerOptions
from recd_plugins.api import DataError, RunStart, try_lock, write_text

#: Files that this process writes to, held so that no other one does. A run that ended without a
#: word leaves them to the next one of the same process.
_held: dict[Path, IO[bytes]] = {}


def claim(path: Path, is_first: Callable[[str], bool]) -> None:
    """Make the folder of a file, and keep other processes from the file where it is there.

    Args:
        path: of the file.
        is_first: whether a line is the first one of such a file.

    Raises:
        DataError: another process writes there, or the file there is of another kind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    hold(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        if (line := file.readline()) and not is_first(line):
            release(path)
            raise DataError(f"{path}: exists and is not a file of this tracker; name another")


def hold(path: Path) -> None:
    """Keep other processes from the file that is there now; it may be another one than before.

    Raises:
        DataError: one writes there.
    """
    release(path)
    file = _held[path] = path.open("ab")
    try:
        try_lock(file.fileno())
    except BlockingIOError:
        raise DataError(f"{path}: another run writes there; name another file") from None


def release(path: Path) -> None:
    """Let others have a file."""
    if file := _held.pop(path, None):
        file.close()


def set_aside(path: Path) -> Path | None:
    """Rename a file of an earlier run, where there is one: ``run.csv`` to ``run.1.csv``."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside) if path.exists() else None


def go_on(
    path: Path,
    records: int,
    last: Mapping[str, float],
    read: Callable[[str, str], Mapping[str, Any]],
) -> bool:
    """Leave the first line of a file and so many records; whether it is the file that had them.

    One that is not, as another run has written there since, is renamed, and stderr says so.

    Args:
        path: of the file.
        records: that it had when the checkpoint was saved.
        last: figures of the last of them.
        read: those of a line, by the first line and that one.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    lines = [line for line in lines if line.endswith("\n")]

    def is_last(line: str) -> bool:
        try:
            there = read(lines[0], line)
            return all(float(there[name]) == value for name, value in last.items())
        except (KeyError, TypeError, ValueError, csv.Error):
            return False

    if len(lines) > records and (is_last(lines[records]) if records else len(lines) == 1):
        write_text(path, "".join(lines[: 1 + records]))
        return True
    if not lines and not records:
        return False
    aside = set_aside(path)
    why = (
        f"has not the {records} records of before the checkpoint that the run goes on from"
        if records
        else "the run goes on from before its first record, so these may be another run's"
    )
    print(
        f"{path}: {why}{f'; it is {aside} now' if aside else ''}, and a new file begins here",
        file=sys.stderr,
    )
    return False


def append(path: Path, text: str) -> None:
    """Write at the end, in one piece."""
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)


def sync(path: Path) -> None:
    """Have a file on disk, where there is one."""
    if path.exists():
        with path.open("rb") as file:
            os.fsync(file.fileno())


_FIRST = ("step", "time", "loss", "learning_rate", "samples_per_second")


class Csv(Tracker):
    """Figures of a run, a row a record, in a CSV file."""

    name = "trackers.csv"
    free_options = frozenset({"path", "every"})

    class Options(TrackerOptions):
        """Where to, and how often."""

        path: LocalPath = Field(description="CSV file; a file of an earlier run is renamed.")

    options: Options

    def begin(self, start: RunStart, kept: int | None, more: Mapping[str, Any]) -> None:  # noqa: ARG002
        """A new file has a header, to which columns are added as figures come."""
        path = self.options.path
        claim(path, lambda line: line.startswith("step,time,"))
        self._columns = list(_FIRST)
        if kept is None:
            set_aside(path)
        elif go_on(path, kept, more.get("last", {}), _row):
            self._columns = next(csv.reader(io.StringIO(path.read_text("utf-8"))))
            hold(path)
            return
        self._records = 0
        append(path, _text([self._columns]))
        hold(path)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """A row, with what it lacks left empty; the file is written anew where a column is."""
        path = self.options.path
        if new := [name for name in figures if name not in self._columns]:
            _, *rows = csv.reader(io.StringIO(path.read_text("utf-8")))
            self._columns += new
            write_text(path, _text([self._columns, *([*row, *[""] * len(new)] for row in rows)]))
            hold(path)
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3), **figures}
        append(path, _text([[record.get(name, "") for name in self._columns]]))

    def flush(self) -> None:
        """On disk."""
        sync(self.options.path)

    def close(self, how: str) -> None:  # noqa: ARG002
        """The file is complete."""
        release(self.options.path)


def _row(names: str, row: str) -> Mapping[str, Any]:
    (found,) = csv.DictReader(io.StringIO(names + row))
    return found


def _text(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


class JsonLines(Tracker):
    """Figures of a run, a JSON object a line, in a file."""

    name = "trackers.jsonl"
    free_options = frozenset({"path", "every"})

    class Options(TrackerOptions):
        """Where to, and how often."""

        path: LocalPath = Field(description="File of lines; a file of an earlier run is renamed.")

    options: Options

    def begin(self, start: RunStart, kept: int | None, more: Mapping[str, Any]) -> None:
        """The first line of a new file has the registry."""
        path = self.options.path
        claim(path, lambda line: line.startswith('{"registry"'))
        if kept is None:
            set_aside(path)
        elif go_on(path, kept, more.get("last", {}), lambda _, line: json.loads(line)):
            hold(path)
            return
        self._records = 0
        self._append({"registry": start.registry, "settings": list(start.settings)})
        hold(path)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """A line."""
        known = {name: each if math.isfinite(each) else None for name, each in figures.items()}
        self._append({"step": step, "time": round(time.time(), 3), **known})

    def flush(self) -> None:
        """On disk."""
        sync(self.options.path)

    def close(self, how: str) -> None:  # noqa: ARG002
        """The file is complete."""
        release(self.options.path)

    def _append(self, value: Mapping[str, Any]) -> None:
        append(self.options.path, json.dumps(value, allow_nan=False) + "\n")
