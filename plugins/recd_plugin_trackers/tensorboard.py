"""``trackers.tensorboard``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from recd_plugin_trackers.tracker import LocalPath, Tracker, TrackerOptions
from recd_plugins.api import RunStart, optional_library


class TensorBoard(Tracker):
    """Figures of a run as scalars of TensorBoard."""

    name = "trackers.tensorboard"
    free_options = frozenset({"path", "every"})

    class Options(TrackerOptions):
        """Where to, and how often."""

        path: LocalPath = Field(
            description="Folder of event files, as tensorboard --logdir takes it."
        )

    options: Options

    def begin(self, start: RunStart, kept: int | None, more: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Events of later steps are marked as void; those of another run get a folder."""
        optional_library("tensorboard", "tensorboard", self.name)
        from torch.utils.tensorboard import SummaryWriter

        if kept is None:
            _set_aside(self.options.path)
        first = 0 if kept is None else start.step + 1
        self._writer = SummaryWriter(str(self.options.path), purge_step=first)
        if kept is None:
            text = "\n".join([start.registry, *(f"# {each}" for each in start.settings)])
            self._writer.add_text("registry", f"```yaml\n{text}\n```", 0)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """A scalar of each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """On disk."""
        self._writer.flush()

    def close(self, how: str) -> None:  # noqa: ARG002
        """No more of it."""
        self._writer.close()


def _set_aside(folder: Path) -> None:
    """Move events of an earlier run, which ours would void, to a folder that is shown beside it."""
    events = [*folder.glob("events.out.tfevents.*")]
    number = 1
    while (aside := folder / f"earlier.{number}").exists():
        number += 1
    if events:
        aside.mkdir()
        for each in events:
            each.rename(aside / each.name)
        print(f"{folder}: events of an earlier run are in {aside} now", file=sys.stderr)
