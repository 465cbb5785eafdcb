"""What sharding plugins may decide by: the ranks of a topology and the registry's data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from recd_plugins.interfaces import Setting, Table, TrainingData
from recd_plugins.planning.planner import machine_of
from recd_plugins.planning.profile import DataProfile, measure_profile

if TYPE_CHECKING:
    from recd_plugins.access.profile import AccessProfile
    from recd_plugins.planning.topologies import TopologySpec
    from recd_plugins.registry import Registry


class RegistryData(TrainingData):
    """The training split of a registry.

    Args:
        registry: its dataset, converter, preprocessing and batch size; prepared, if it checks ids.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._access: dict[tuple[tuple[Table, ...], int | None, bool], AccessProfile] = {}

    @cached_property
    def _profile(self) -> DataProfile:
        with _off_meta():
            return measure_profile(self._registry)

    def profile(self) -> DataProfile:
        """See ``TrainingData.profile``."""
        return self._profile

    def access(
        self, tables: Sequence[Table], rows: int | None, *, deduplicated: bool = True
    ) -> AccessProfile:
        """See ``TrainingData.access``."""
        from recd_plugins.access.measure import measure_access

        key = tuple(tables), rows, deduplicated
        if key not in self._access:
            with _off_meta():
                self._access[key] = measure_access(
                    self._registry, tables, rows=rows, deduplicated=deduplicated
                )
        return self._access[key]


def _off_meta() -> torch.device:
    """A context in which tensors have values, also where a model is prepared on the meta device."""
    return torch.device("cpu")


def setting_of(
    registry: Registry,
    topology: TopologySpec | None = None,
    *,
    device: torch.device | None = None,
    data: TrainingData | None = None,
) -> Setting:
    """What sharding plugins of ``registry`` decide by.

    Args:
        registry: its batch size, optimizer and data.
        topology: the ranks; ``machine_of`` this process without it.
        device: of the tables of that machine; CPU without it.
        data: in place of the registry's own, as what another setting has measured already.

    Raises:
        SetupError: the ranks do not fill nodes.
    """
    spec = topology or machine_of(registry, device=device)
    return Setting(
        world_size=spec.world_size,
        ranks_per_node=spec.ranks_per_node,
        batch_size=registry.training.batch_size,
        optimizer=registry.training.optimizer,
        device_type=spec.device,
        rates=spec.collective_rates,
        sections=spec.sections,
        memory_bytes=spec.memory_bytes,
        data=data or RegistryData(registry),
    )
