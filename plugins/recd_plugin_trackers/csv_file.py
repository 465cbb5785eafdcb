"""``trackers.csv``."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from recd_plugin_trackers import kept_lines
from recd_plugin_trackers.tracker import LocalPath, Tracker, TrackerOptions
from recd_plugins.api import RunStart
from recd_plugins.api.files import write_text

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
        kept_lines.claim(path, lambda line: line.startswith("step,time,"))
        self._columns = list(_FIRST)
        if kept is None:
            kept_lines.set_aside(path)
        elif kept_lines.go_on(path, kept, more.get("last", {}), _row):
            self._columns = next(csv.reader(io.StringIO(path.read_text("utf-8"))))
            kept_lines.hold(path)
            return
        self._records = 0
        kept_lines.append(path, _text([self._columns]))
        kept_lines.hold(path)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """A row, with what it lacks left empty; the file is written anew where a column is."""
        path = self.options.path
        if new := [name for name in figures if name not in self._columns]:
            _, *rows = csv.reader(io.StringIO(path.read_text("utf-8")))
            self._columns += new
            write_text(path, _text([self._columns, *([*row, *[""] * len(new)] for row in rows)]))
            kept_lines.hold(path)
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3), **figures}
        kept_lines.append(path, _text([[record.get(name, "") for name in self._columns]]))

    def flush(self) -> None:
        """On disk."""
        kept_lines.sync(self.options.path)

    def close(self, how: str) -> None:  # noqa: ARG002
        """The file is complete."""
        kept_lines.release(self.options.path)


def _row(names: str, row: str) -> Mapping[str, Any]:
    (found,) = csv.DictReader(io.StringIO(names + row))
    return found


def _text(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
