"""``trackers.jsonl``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from recd_plugin_trackers import kept_lines
from recd_plugin_trackers.tracker import LocalPath, Tracker, TrackerOptions
from recd_plugins.api import RunStart


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
        kept_lines.claim(path, lambda line: line.startswith('{"registry"'))
        if kept is None:
            kept_lines.set_aside(path)
        elif kept_lines.go_on(path, kept, more.get("last", {}), lambda _, line: json.loads(line)):
            kept_lines.hold(path)
            return
        self._records = 0
        self._append({"registry": start.registry, "settings": list(start.settings)})
        kept_lines.hold(path)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """A line."""
        known = {name: each if math.isfinite(each) else None for name, each in figures.items()}
        self._append({"step": step, "time": round(time.time(), 3), **known})

    def flush(self) -> None:
        """On disk."""
        kept_lines.sync(self.options.path)

    def close(self, how: str) -> None:  # noqa: ARG002
        """The file is complete."""
        kept_lines.release(self.options.path)

    def _append(self, value: Mapping[str, Any]) -> None:
        kept_lines.append(self.options.path, json.dumps(value, allow_nan=False) + "\n")
