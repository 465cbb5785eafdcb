"""Options of ``dsi.ray``."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Self

from pydantic import Field, StrictInt, model_validator

from recd_plugins.api import PluginOptions, SetupError, text_utils

Count = Annotated[StrictInt, Field(gt=0)]

# Default number of readers per rank.
_READERS = 2


class RayOptions(PluginOptions):
    """Options of ``dsi.ray``: cluster, number of readers, read-ahead."""

    address: str | None = Field(
        default=None,
        description=(
            "Ray cluster to join: HOST:PORT, or auto for this machine's cluster. "
            "null starts one on each machine for the run, shared by its ranks."
        ),
    )
    cpus: Count | None = Field(
        default=None,
        description="CPUs of a cluster started for the run; null uses all CPUs of the machine.",
    )
    readers: Count | None = Field(
        default=None,
        description=(
            "Readers per rank. null uses 2, or a number between min_readers and max_readers."
        ),
    )
    min_readers: Count | None = Field(
        default=None,
        description=(
            "Minimum and initial number of readers per rank; null uses 1 if max_readers is given."
        ),
    )
    max_readers: Count | None = Field(
        default=None, description="Maximum number of readers per rank, for autoscaling."
    )
    stall_target: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description=(
            "Share of time that the trainer may wait for batches. Autoscaling adds "
            "readers above it."
        ),
    )
    stall_window: Count = Field(
        default=32, description="Steps over which autoscaling measures the trainer's waiting time."
    )
    cpus_per_reader: float = Field(
        default=1.0, gt=0, description="CPUs of the cluster per reader; may be a fraction."
    )
    memory: str | Count = Field(
        default="256MB",
        description=(
            "Maximum bytes of a rank's batches that are ready or being made, such "
            "as 256MB. Readers pause when it is reached."
        ),
    )
    deaths: Count = Field(
        default=3,
        description="Readers that may die on one block of batches. One more ends the run.",
    )
    start_timeout: Annotated[float, Field(gt=0)] = Field(
        default=180.0, description="Seconds to wait for Ray, and for the first reader of a rank."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        text_utils.read_bytes(self.memory)
        if self.readers is not None and (self.min_readers or self.max_readers):
            raise ValueError(
                "readers is a fixed number, min_readers and max_readers are the bounds of "
                "autoscaling: give one or the others"
            )
        if self.min_readers is not None and self.max_readers is None:
            raise ValueError("min_readers needs max_readers; for a fixed number give readers")
        low, high = self.bounds
        if low > high:
            raise ValueError(f"min_readers is {low}, more than max_readers, {high}")
        if self.cpus is not None and self.address is not None:
            raise ValueError(
                "cpus is for a cluster that the run starts, and address joins one that exists: "
                "leave one of them out"
            )
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the minimum and maximum readers per rank; they are equal without autoscaling."""
        if self.max_readers is None:
            readers = self.readers or _READERS
            return readers, readers
        return self.min_readers or 1, self.max_readers

    @property
    def memory_bytes(self) -> int:
        """Return the option ``memory`` in bytes."""
        return text_utils.read_bytes(self.memory)


def check_ray() -> None:
    """Raise an error if Ray is missing, without importing it."""
    if importlib.util.find_spec("ray") is None:
        raise SetupError(
            'dsi.ray runs readers on Ray, which is not installed: pip install "recd-plugins[ray]"; '
            "or take the ingestion section out, and the trainer reads by itself"
        )
