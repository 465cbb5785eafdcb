"""What steps and the rows that they fetch cost: the section ``cache`` of a topology."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from recd_plugin_scars.planning.order import StepCosts

if TYPE_CHECKING:
    from recd_plugins.api import TopologySpec

#: Its name in a topology.
SECTION = "cache"

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# Of an iteration, however small its batch: an assumption, for a small model without a profiler.
_STEP_SECONDS = {"cpu": 5e-3, "cuda": 2e-3}


class CacheRates(BaseModel):
    """Seconds of a rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sample_seconds: Seconds = Field(default=0.0, description="For a sample, whatever its rows.")
    step_seconds: Seconds = Field(description="For an iteration, however small its batch: tau.")
    byte_seconds: Seconds = Field(
        description="For a byte of a row that is fetched from the backing store and written back."
    )

    @classmethod
    def of_topology(cls, topology: TopologySpec) -> Self:
        """What the bandwidths allow, and an assumption for an iteration.

        A row is read in the backing store and written to fast memory, and the same back.
        """
        between = topology.hbm_to_ddr_bandwidth
        bandwidth = between if between is not None else topology.ddr_bandwidth / 2
        return cls(
            step_seconds=_STEP_SECONDS[topology.device],
            byte_seconds=2 / bandwidth,
        )

    def costs(self, ranks: int) -> StepCosts:
        """The same for so many ranks together: an iteration takes the time of them all."""
        return StepCosts(self.sample_seconds, self.step_seconds * ranks, self.byte_seconds)


def measured_rates(topology: TopologySpec) -> CacheRates | None:
    """The rates of the section ``cache``; None where nothing was measured."""
    found = topology.sections.get(SECTION)
    assert found is None or isinstance(found, CacheRates), "the package declares it"
    return found


def rates_of(topology: TopologySpec) -> CacheRates:
    """The rates of the section ``cache``, or what the bandwidths allow."""
    return measured_rates(topology) or CacheRates.of_topology(topology)
