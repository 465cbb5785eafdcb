"""Options of the plugin ``dsi.ray``."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Self

from pydantic import Field, StrictInt, model_validator

from recd_plugins.api import PluginOptions, SetupError, text_utils

Count = Annotated[StrictInt, Field(gt=0)]

# Default number of readers per rank.
_READERS = 2


class RayOptions(PluginOptions):
    """Options of the plugin ``dsi.ray``: the Ray cluster, the number of readers and memory."""

    address: str | None = Field(
        default=None,
        description=(
            "Ray cluster to join: HOST:PORT, or auto for a cluster on this machine. "
            "null starts a cluster on each machine for this run."
        ),
    )
    cpus: Count | None = Field(
        default=None,
        description="Number of CPUs that a cluster started for this run may use; null uses all.",
    )
    readers: Count | None = Field(
        default=None,
        description=(
            "Number of readers per rank. null uses 2, or autoscaling if max_readers is set."
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
            "readers if the trainer waits longer, and stops readers below a quarter of it."
        ),
    )
    stall_window: Count = Field(
        default=32, description="Number of steps between two decisions of autoscaling."
    )
    cpus_per_reader: float = Field(
        default=1.0, gt=0, description="Number of CPUs that Ray reserves per reader, such as 0.5."
    )
    memory: str | Count = Field(
        default="256MB",
        description=(
            "Maximum size of the batches that a rank's readers have prepared, such as 256MB. "
            "Readers pause when they reach this size."
        ),
    )
    deaths: Count = Field(
        default=3,
        description=(
            "Number of times that readers may die on the same batches. The run ends with an "
            "error if a reader dies once more."
        ),
    )
    start_timeout: Annotated[float, Field(gt=0)] = Field(
        default=180.0,
        description="Seconds to wait for the start of Ray, and for the first batch.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        text_utils.read_bytes(self.memory)
        if self.readers is not None and (self.min_readers or self.max_readers):
            raise ValueError(
                "option 'readers' cannot be combined with 'min_readers' and 'max_readers'. Set "
                "'readers' for a fixed number of readers, or 'min_readers' and 'max_readers' for "
                "autoscaling."
            )
        if self.min_readers is not None and self.max_readers is None:
            raise ValueError(
                "option 'min_readers' is set without 'max_readers'. Set 'max_readers' for "
                "autoscaling, or 'readers' for a fixed number of readers."
            )
        low, high = self.bounds
        if low > high:
            raise ValueError(
                f"option 'min_readers' ({low}) is larger than 'max_readers' ({high}). Reduce "
                "'min_readers' or raise 'max_readers'."
            )
        if self.cpus is not None and self.address is not None:
            raise ValueError(
                "options 'cpus' and 'address' are both set, but 'cpus' only applies to a Ray "
                "cluster that the run starts. Remove 'cpus' to join the cluster at this address, "
                "or remove 'address'."
            )
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the minimum and the maximum number of readers per rank."""
        if self.max_readers is None:
            readers = self.readers or _READERS
            return readers, readers
        return self.min_readers or 1, self.max_readers

    @property
    def memory_bytes(self) -> int:
        """Return the option ``memory`` in bytes."""
        return text_utils.read_bytes(self.memory)


def check_ray() -> None:
    """Raise SetupError if Ray is not installed. Does not import Ray."""
    if importlib.util.find_spec("ray") is None:
        raise SetupError(
            "ingestion plugin 'dsi.ray' needs Ray, which is not installed. Run pip install "
            '"recd-plugins[ray]", or remove the ingestion: section to read in the trainer.'
        )
