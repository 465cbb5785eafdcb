"""The callback ``runs.publish``: publishes the model for serving while training continues."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugins.api import Callback, PluginOptions, RunEnd, RunInterruption, RunStart, RunStep

if TYPE_CHECKING:
    from recd_plugin_runs.publisher import Publisher


class Publish(Callback):
    """Write exported programs and then changed rows, for ``recd_plugins.serving.LiveModel``."""

    name = "runs.publish"
    free_options = frozenset({"folder", "every", "seconds", "base_every", "keep"})

    class Options(PluginOptions):
        """Options for the output folder and the intervals."""

        folder: Path = Field(description="Output folder, which all ranks can write to.")
        every: int = Field(default=1000, gt=0, description="Training steps per delta.")
        seconds: float | None = Field(
            default=None,
            gt=0,
            description="Also write a delta at the first step after this many seconds.",
        )
        base_every: int = Field(default=100, gt=0, description="Deltas per base with all rows.")
        keep: int = Field(
            default=2, gt=0, description="Number of bases to keep. Deltas before them are removed."
        )

    options: Options

    def on_start(self, start: RunStart) -> None:
        from recd_plugin_runs.publisher import Publisher

        self._publisher: Publisher = Publisher(self.options, start)

    def on_step(self, step: RunStep) -> None:
        if self._publisher.is_due(step.step):
            self._publisher.publish_delta(step.step)

    def on_interrupt(self, interruption: RunInterruption) -> None:
        self._publisher.publish_delta(interruption.step)

    def on_end(self, end: RunEnd) -> None:
        self._publisher.publish_delta(end.step)
