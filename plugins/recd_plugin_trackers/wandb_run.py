"""``trackers.wandb``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from recd_plugin_trackers.settings import config_of
from recd_plugin_trackers.tracker import Tracker, TrackerOptions
from recd_plugins.api import RunStart, optional_library


class WandB(Tracker):
    """Figures of a run to Weights & Biases."""

    name = "trackers.wandb"
    free_options = frozenset({"project", "run", "folder", "mode", "every"})

    class Options(TrackerOptions):
        """Where to, and how often."""

        project: str = Field(description="Project of Weights & Biases.")
        run: str | None = Field(default=None, description="Name of the run; null takes a new one.")
        folder: Path = Field(default=Path("."), description="Folder in which it puts its wandb/.")
        mode: Literal["online", "offline"] = Field(
            default="online", description="Whether it sends, or leaves that to `wandb sync`."
        )

    options: Options

    def begin(self, start: RunStart, kept: int | None, more: Mapping[str, Any]) -> None:
        """A run that goes on is the same there, too."""
        wandb = optional_library("wandb", "wandb", self.name)
        options = self.options
        options.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=options.project,
            name=options.run,
            dir=str(options.folder),
            mode=options.mode,
            id=more.get("run"),
            resume=None if kept is None or options.mode == "offline" else "allow",
            config=config_of(start),
            settings=wandb.Settings(console="off"),
        )
        # It takes no steps from before those that it has; the same figures come again.
        self._first = self._run.step if kept is not None else 0

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """A step of its history."""
        if step >= self._first:
            self._run.log(dict(figures), step=step)

    def more_state(self) -> Mapping[str, Any]:
        """Which run it is there."""
        return {"run": self._run.id}

    def close(self, how: str) -> None:
        """Send what is left."""
        self._run.finish(exit_code=0 if how == "completed" else 1)
