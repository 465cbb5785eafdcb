"""bench.slow: preprocessing that takes its time, by waiting or by computing."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field
from torch import Tensor

from recd_plugins.api import PluginOptions, Preprocessing, hookimpl


class Slow(Preprocessing):
    """Leaves every id as it is."""

    name = "bench.slow"

    class Options(PluginOptions):
        seconds: float = Field(ge=0, description="Of a batch.")
        by: Literal["waiting", "computing"] = Field(
            default="waiting",
            description="As a call of a feature store does, or as a processor is busy.",
        )
        seen: Path | None = Field(
            default=None, description="Folder in which each process touches a file of its number."
        )

    options: Options

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        if self.options.seen is not None:
            (self.options.seen / str(os.getpid())).touch()
        if self.options.by == "waiting":
            time.sleep(self.options.seconds)
            return values, offsets
        end = time.thread_time() + self.options.seconds
        while time.thread_time() < end:
            pass
        return values, offsets


@hookimpl
def register_preprocessing() -> Sequence[type[Preprocessing]]:
    return [Slow]
