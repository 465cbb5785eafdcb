"""``recd plan --tiers --calibrate``: measures this machine, and writes it as a topology."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table as TextTable

from recd_plugin_flexshard.planning.calibrate import MemoryCalibration, calibrate_memory
from recd_plugin_flexshard.planning.report_text import COLLECTIVE_NAMES
from recd_plugin_flexshard.planning.sections import SECTION
from recd_plugin_flexshard.planning.tier_study import planned_tiers
from recd_plugins.api import SetupError
from recd_plugins.api.planning import CollectiveRates, TopologySpec
from recd_plugins.api.registry import RunConfig
from recd_plugins.api.training import measure_collectives, refuse_existing, write_topology


@dataclass(frozen=True)
class TierCalibration:
    """What was measured: collectives, and memory of replicated rows."""

    rates: CollectiveRates
    memory: MemoryCalibration

    def table(self) -> TextTable:
        """Both in words."""
        table = TextTable(title="measured", title_justify="left")
        table.add_column("")
        table.add_column("latency, ms", justify="right")
        table.add_column("MB/s", justify="right")
        for name, rate in self.rates:
            table.add_row(
                COLLECTIVE_NAMES[name],
                f"{rate.seconds * 1e3:.3f}",
                f"{rate.bytes_per_second / 1e6:,.0f}",
            )
        memory = self.memory.memory
        table.caption = (
            f"M = {memory.memory_multiplier:.2f}, c = {memory.saved_activations:.2f}; at a size "
            f"that they were not fitted to, they are {abs(self.memory.error):.1%} off"
        )
        table.caption_justify = "left"
        return table


def calibrate_tiers(
    registry: RunConfig, spec: TopologySpec, path: Path
) -> tuple[TopologySpec, TierCalibration]:
    """Measure as many ranks as ``spec`` has, and write it to ``path`` with what was found.

    Raises:
        RecdError: there is such a file already, no table of the registry has tiers, or this machine
            is not that topology.
    """
    refuse_existing(path)
    if spec.device == "cuda" and torch.cuda.device_count() < spec.world_size:
        raise SetupError(
            f"measuring {spec.world_size} ranks needs as many CUDA devices on this machine, and "
            f"there are {torch.cuda.device_count()}; leave --topology out to measure what is here"
        )
    demands = [
        table.demand
        for plan in planned_tiers(registry, spec).plans.values()
        for table in plan.tables
    ]
    width = max(demand.embedding_dim for demand in demands)
    lookups = sum(demand.length / demand.dedupe_factor for demand in demands)
    found = TierCalibration(
        measure_collectives(spec.world_size, spec.ranks_per_node, spec.device),
        calibrate_memory(
            registry.training,
            width,
            lookups * registry.training.batch_size,
            world_size=spec.world_size,
            ranks_per_node=spec.ranks_per_node,
            device_type=spec.device,
        ),
    )
    measured = spec.model_copy(update={"collectives": found.rates})
    measured = measured.with_section(SECTION, found.memory.memory)
    comment = f"Measured by recd plan {registry.path} --tiers --calibrate {path}."
    write_topology(path, measured, comment)
    return measured, found
