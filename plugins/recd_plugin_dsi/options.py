"""Options of ``dsi.ray``, and the versions of Ray that it takes."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Self

from pydantic import Field, StrictInt, field_validator, model_validator

from recd_plugins.api import PluginOptions, SetupError, read_bytes

#: The oldest one whose tasks ``feeder.py`` can bound, and the first that is refused unseen.
OLDEST, TOO_NEW = (2, 60), (2, 61)

_INSTALL = 'pip install "recd-plugins[ray]"'

Count = Annotated[StrictInt, Field(gt=0)]

# Of each rank, where the options do not say.
_READERS = 2


class RayOptions(PluginOptions):
    """Where readers run, how many, and how far they read ahead."""

    address: str | None = Field(
        default=None,
        description="A Ray cluster to join: HOST:PORT, or auto for the one of this machine; null "
        "starts one on each machine for the time of the run, which its ranks share.",
    )
    cpus: Count | None = Field(
        default=None,
        description="CPUs that a cluster started for the run has; null gives it those of the "
        "machine.",
    )
    readers: Count | None = Field(
        default=None,
        description="Readers of each rank; null takes 2, or what is between the bounds.",
    )
    min_readers: Count | None = Field(
        default=None,
        description="Fewest readers of each rank, with which it starts; null takes 1 where "
        "max_readers is given.",
    )
    max_readers: Count | None = Field(
        default=None, description="Most readers of each rank, for autoscaling."
    )
    stall_target: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="Share of its time that the trainer may wait for batches; autoscaling adds "
        "readers above it.",
    )
    stall_window: Count = Field(
        default=32, description="Steps over which autoscaling measures what the trainer waits."
    )
    cpus_per_reader: float = Field(
        default=1.0, gt=0, description="CPUs of the cluster that a reader takes; may be a fraction."
    )
    memory: str | Count = Field(
        default="256MB",
        description="Batches of a rank that may be ready or in the making, in bytes, as 256MB: "
        "beyond that its readers pause.",
    )
    deaths: Count = Field(
        default=3,
        description="Readers that may die over one block of batches; the next one ends the run.",
    )
    start_timeout: Annotated[float, Field(gt=0)] = Field(
        default=180.0, description="Seconds to wait for Ray, and for a first reader of a rank."
    )

    @field_validator("memory")
    @classmethod
    def _memory_is_known(cls, value: str | int) -> str | int:
        read_bytes(value)
        return value

    @model_validator(mode="after")
    def _readers_agree(self) -> Self:
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
        """Fewest and most readers of a rank; equal without autoscaling."""
        if self.max_readers is None:
            readers = self.readers or _READERS
            return readers, readers
        return self.min_readers or 1, self.max_readers

    @property
    def memory_bytes(self) -> int:
        """``memory`` as a number."""
        return read_bytes(self.memory)


def check_ray() -> None:
    """Look at what is installed, without importing it."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise SetupError(
            f"dsi.ray runs readers on Ray, which is not installed: {_INSTALL}; or take the "
            "ingestion section out, and the trainer reads by itself"
        ) from None
    major, minor = (int(part) for part in version.split(".")[:2])
    if not OLDEST <= (major, minor) < TOO_NEW:
        oldest, too_new = (".".join(map(str, each)) for each in (OLDEST, TOO_NEW))
        raise SetupError(
            f"dsi.ray needs Ray {oldest} or newer, below {too_new}, and {version} is there: "
            f"{_INSTALL}"
        )
