"""Plan context for sharding plugins: the topology, and measurements of the training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import _disable_current_modes

from recd_plugins.config import RunConfig, at_entry
from recd_plugins.data.access import measure_access
from recd_plugins.interfaces import PlanContext, Table, TrainingData
from recd_plugins.interfaces.access import AccessProfile
from recd_plugins.interfaces.data_profile import DataProfile, DistinctIds
from recd_plugins.interfaces.model_tables import EmbeddingModule, rows_by_feature
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.planning.profile import distinct_reads, measure_profile
from recd_plugins.planning.topologies import TopologySpec, machine_of
from recd_plugins.sharding.wire import scalar_bytes


class RegistryData(TrainingData):
    """The training split of a run config.

    Without ``modules``, the ``embedding_modules`` of the unprepared model, ids are not checked, and
    no table is coalesced.
    """

    def __init__(self, registry: RunConfig, modules: Sequence[EmbeddingModule] = ()) -> None:
        self._registry, self._modules = registry, modules
        self._distinct: dict[tuple[Table, ...], Mapping[str, DistinctIds]] = {}
        self._access: dict[tuple[tuple[Table, ...], int | None, bool], AccessProfile] = {}

    @cached_property
    def _profile(self) -> DataProfile:
        return profile_of_modules(self._registry, self._modules)

    def profile(self) -> DataProfile:
        return self._profile

    def access(
        self, tables: Sequence[Table], rows: int | None, *, deduplicated: bool = True
    ) -> AccessProfile:
        key = tuple(tables), rows, deduplicated
        if key not in self._access:
            with off_meta():
                self._access[key] = measure_access(
                    self._registry, tables, rows=rows, deduplicated=deduplicated
                )
        return self._access[key]

    def distinct(self, tables: Sequence[Table]) -> Mapping[str, DistinctIds]:
        key = tuple(tables)
        if key not in self._distinct:
            with off_meta():
                self._distinct[key] = distinct_reads(self._registry, tables)
        return self._distinct[key]


def profile_of_modules(
    registry: RunConfig, modules: Sequence[EmbeddingModule], coalesced: Sequence[Table] = ()
) -> DataProfile:
    """Measure lengths, dedupe factors and distinct ids of the features of unprepared ``modules``.

    ``coalesced`` tables (each distinct id is sent once) are added to those of sharding entries.
    """
    ours = [table for module in modules if module.ours for table in module.tables]
    claims = registry.claim("sharding", [table.name for table in ours]) if ours else {}
    by_entries = [t for t in ours if t.name in claims and claims[t.name].plugin.coalesces]
    with off_meta():
        return measure_profile(
            registry,
            num_embeddings=rows_looked_up(registry, modules),
            coalesced=[*coalesced, *by_entries],
            others=ours,
        )


@contextmanager
def off_meta() -> Iterator[None]:
    """Create tensors with values in this context, even inside ``torch.device("meta")``."""
    # A device context, even for CPU, routes each torch call through Python.
    on_cpu = torch.get_default_device().type == "cpu"
    with _disable_current_modes(), nullcontext() if on_cpu else DisableTorchFunction():
        yield


def id_limits(registry: RunConfig, tables: Sequence[Table]) -> dict[str, int | None]:
    """Return a dict from table with a sharding entry to its exclusive id limit; None: no limit."""
    claims = registry.claim("sharding", [table.name for table in tables]) if tables else {}
    limits: dict[str, int | None] = {}
    for table in tables:
        if (entry := claims.get(table.name)) is None:
            continue
        with at_entry(registry.path, entry), plugin_call(entry.plugin, "id_limit"):
            limits[table.name] = entry.plugin.id_limit(table)
    return limits


def rows_looked_up(registry: RunConfig, modules: Sequence[EmbeddingModule]) -> dict[str, int]:
    """Return a dict from feature to its table's row count; omit features whose ids are remapped."""
    limits = id_limits(registry, [table for each in modules if each.ours for table in each.tables])
    return rows_by_feature(
        table
        for module in modules
        if module.takes_rows
        for table in module.tables
        if limits.get(table.name, table.num_embeddings) == table.num_embeddings
    )


def plan_context(
    registry: RunConfig,
    modules: Sequence[EmbeddingModule],
    topology: TopologySpec | None = None,
    *,
    device: torch.device | None = None,
    data: TrainingData | None = None,
) -> PlanContext:
    """Return the plan context (topology, batch size and data) for sharding plugins.

    The default of ``topology`` is ``training.topology``, or this machine with the process group's
    ranks. ``data`` replaces the data of the run config, for example if it was measured before.

    Raises:
        SetupError: the number of ranks is not a multiple of the ranks per node, or tables do not
            suit ``training.wire``.
    """
    spec = topology or machine_of(registry.training, device=device)
    ours = [table for module in modules if module.ours for table in module.tables]
    return PlanContext(
        world_size=spec.world_size,
        ranks_per_node=spec.ranks_per_node,
        batch_size=registry.training.batch_size,
        optimizer=registry.training.optimizer,
        device_type=spec.device,
        rates=spec.collective_rates,
        memory_bytes=spec.memory_bytes,
        costs=spec.costs or spec.least_costs,
        topology=spec.to_torchrec(),
        data=data or RegistryData(registry, modules),
        measured=spec.costs is not None,
        wire_bytes=scalar_bytes(registry.training.wire, ours),
    )
