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
    """Options of ``dsi.ray``: the Ray cluster, the number of readers and their memory."""

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
            "Readers per rank. null uses 2 readers, or autoscaling if max_readers is set."
        ),
    )
    min_readers: Count | None = Field(
        default=None,
        description=(
            "Minimum and initial number of readers per rank; null uses 1 if max_readers is set."
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
            "Fraction of time that the trainer may wait for batches. Autoscaling adds "
            "readers if the trainer waits longer."
        ),
    )
    stall_window: Count = Field(
        default=32, description="Steps over which autoscaling measures the trainer's waiting time."
    )
    cpus_per_reader: float = Field(
        default=1.0, gt=0, description="CPUs of the cluster for each reader; may be a fraction."
    )
    memory: str | Count = Field(
        default="256MB",
        description=(
            "Maximum size of each rank's batches that are ready or being made, such "
            "as 256MB. Readers pause when they reach this size."
        ),
    )
    deaths: Count = Field(
        default=3,
        description=(
            "Number of times that a reader may die while reading the same block of batches. "
            "The run ends when a reader dies once more."
        ),
    )
    start_timeout: Annotated[float, Field(gt=0)] = Field(
        default=180.0,
        description="Seconds to wait until Ray has started, and for the first batch of each rank.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        text_utils.read_bytes(self.memory)
        if self.readers is not None and (self.min_readers or self.max_readers):
            raise ValueError(
                "readers cannot be combined with min_readers and max_readers. Set readers for a "
                "fixed number of readers, or min_readers and max_readers for autoscaling."
            )
        if self.min_readers is not None and self.max_readers is None:
            raise ValueError(
                "min_readers is set without max_readers. Set max_readers for autoscaling, or "
                "readers for a fixed number of readers."
            )
        low, high = self.bounds
        if low > high:
            raise ValueError(
                f"min_readers ({low}) is larger than max_readers ({high}). "
                "Lower min_readers or raise max_readers."
            )
        if self.cpus is not None and self.address is not None:
            raise ValueError(
                "cpus and address are both set, but cpus only applies to a Ray cluster that the "
                "run starts. Remove cpus to join the cluster at address, or remove address."
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
            'dsi.ray needs Ray, which is not installed. Run pip install "recd-plugins[ray]", or '
            "remove the ingestion: section to read in the trainer."
        )
