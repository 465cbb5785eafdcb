"""Report of ``recd plan --cache``: the planned cache and expected traffic of each table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_scars.planning.load import TableLoad
from recd_plugin_scars.planning.order import Memory, StepCosts
from recd_plugin_scars.planning.plan import STEPS, CachedTable, CachePlan, row_order
from recd_plugins.api import (
    AccessProfile,
    RecdError,
    RegistryData,
    RunConfig,
    build_model,
    measure_compute,
    model_tables,
    prepared_data,
    study,
    text_table,
    text_utils,
    topologies,
    topology_line,
)

# Maximum number of tables in the report, those with the most traffic first.
_LINES = 16
_PROFILE_ROWS = 1 << 16
_LARGEST_BATCH = 1 << 16
# Assumed seconds of an iteration with a tiny batch (tau).
_STEP_SECONDS = {"cpu": 5e-3, "cuda": 2e-3}


@dataclass(frozen=True)
class CachePlanReport:
    """Result of ``recd plan --cache``.

    Attributes:
        source: description of the data or file that the row reads were counted in.
        memory: memory budget in bytes over all ranks; None means no limit.
        shared: memory shared by cached rows and the batch; None if the batch size was given.
    """

    topology: str
    spec: topologies.TopologySpec
    source: str
    plan: CachePlan
    memory: int | None
    shared: Memory | None = None

    def as_json(self) -> dict[str, Any]:
        tables = self.plan.tables
        return {
            "topology": {"name": self.topology, "ranks": self.spec.world_size},
            "reads": self.source,
            "batch_size": self.plan.batch_size,
            "memory_bytes": self.memory,
            "sample_bytes": self.shared and self.shared.sample,
            "limit": "memory" if self.plan.is_full else "useful",
            "tables": {name: _table(table) for name, table in tables.items()},
            "bytes_per_step": _bytes(list(tables.values())),
        }


def study_caches(
    registry: RunConfig,
    topology: str,
    spec: topologies.TopologySpec,
    say: Callable[[str], None],
    *,
    batch_size: int | None,
    memory: int | None = None,
    sample_bytes: int | None = None,
    profile: Path | None = None,
) -> CachePlanReport:
    """Plan caches for the tables in the ``cache:`` section, or for all tables if it is missing.

    Args:
        registry: the parsed registry file.
        topology: name of the topology ``spec``.
        spec: the cluster.
        say: function that prints progress messages.
        batch_size: rows per rank; None searches for the best batch size within ``memory``.
        memory: bytes of cache memory over all ranks; None means no limit.
        sample_bytes: memory per sample in bytes; None estimates activations and fetched rows.
        profile: file of an access profile; None counts the row reads in the data.

    Raises:
        RecdError: registry, data and model do not match.
        DataError: the profile is for other tables.
    """
    prepared_data.wrapped_dataset(registry).prepare()
    if not registry.has_model:
        raise RecdError(
            f"{registry.path}: the registry has no model: section, which defines the tables. Add a "
            "model: section."
        )
    with torch.device("meta"):
        tables = model_tables.tables_of(build_model(registry, registry.dataset.schema()))
    claimed = registry.claim("cache", [table.name for table in tables])
    tables = [table for table in tables if not claimed or table.name in claimed]
    if profile is None:
        say(f"counting row reads of {len(tables)} tables")
        reads = RegistryData(registry).access(tables, _PROFILE_ROWS)
    else:
        reads = AccessProfile.load(profile)
    loads = {
        table.name: TableLoad(reads.covering(table.name, table.num_embeddings), table.embedding_dim)
        for table in tables
    }
    shared, optimizer, ranks = None, registry.training.optimizer, spec.world_size
    if batch_size is not None:
        plan = CachePlan.within(
            loads, memory, batch_size=batch_size * ranks, optimizer=optimizer, held=1
        )
    else:
        assert memory is not None, "the command checks it"
        if sample_bytes is None:
            say("estimating the memory per sample")
            sample_bytes = _sample_bytes(registry, spec, loads)
        shared = Memory(memory, max(1, sample_bytes), ranks, _LARGEST_BATCH * ranks)
        plan = plan_with_batch(loads, shared, _costs(spec), optimizer, ranks)
    return CachePlanReport(topology, spec, reads.source, plan, memory, shared)


def plan_with_batch(
    loads: Mapping[str, TableLoad], shared: Memory, costs: StepCosts, optimizer: str, ranks: int
) -> CachePlan:
    """Return the cache plan and batch size with the least cost per sample.

    Cached rows and the batch share the memory ``shared``.
    """
    order = row_order(loads, optimizer)
    useful = order.useful(STEPS * shared.batch_size(0))
    best = order.best(shared, costs, useful)
    plan = CachePlan.of(
        loads,
        dict(zip(loads, order.rows(best.place), strict=True)),
        batch_size=int(best.batch_size) // ranks * ranks,
        optimizer=optimizer,
        held=1,
    )
    return replace(plan, is_full=best.place < useful)


def _sample_bytes(
    registry: RunConfig, spec: topologies.TopologySpec, loads: Mapping[str, TableLoad]
) -> int:
    """Estimate the bytes per sample: activations, and fetched rows of two batches."""
    batch_size = registry.training.batch_size
    model = study.with_plugins(replace(registry, cache=(), wrappers=()), spec)
    activations = model.activation_bytes(measure_compute(registry), batch_size) / batch_size
    widths = [load.lookups * load.embedding_dim * 4 for load in loads.values()]
    return round(activations + 2 * sum(widths))


def _costs(spec: topologies.TopologySpec) -> StepCosts:
    """Estimate training costs in seconds, summed over ranks. Rows are read and written back."""
    bandwidth = spec.hbm_to_ddr_bandwidth or spec.ddr_bandwidth / 2
    return StepCosts(0.0, _STEP_SECONDS[spec.device] * spec.world_size, 2 / bandwidth)


def _bytes(tables: Sequence[CachedTable]) -> dict[str, float]:
    """Return bytes per step: ``plain`` (no cache), ``coalesced`` (rows read once), ``cached``."""
    return {
        "plain": sum(table.traffic.plain_bytes for table in tables),
        "coalesced": sum(table.traffic.coalesced_bytes for table in tables),
        "cached": sum(table.traffic.bytes for table in tables),
    }


def _table(table: CachedTable) -> dict[str, Any]:
    traffic = table.traffic
    return {
        "rows": table.load.num_embeddings,
        "dim": table.load.embedding_dim,
        "cached_rows": table.cached,
        "load_factor": table.load_factor,
        "cached_bytes": table.cached_bytes,
        "lookups": traffic.lookups,
        "unique_rows": traffic.unique_rows,
        "misses": traffic.misses,
        "hit_rate": traffic.hit_rate,
        "lookups_hit": table.load.access.covered(table.cached),
        "bytes_per_step": _bytes([table]),
    }


def render(report: CachePlanReport) -> RenderableType:
    """Return the report for the terminal: topology, planned caches, and traffic per step."""
    plan, ranks = report.plan, report.spec.world_size
    within = "" if report.memory is None else f" within {text_utils.size_text(report.memory)}"
    tables = sorted(plan.tables.values(), key=lambda t: -t.traffic.coalesced_bytes)
    headings = ("rows", "cached", "share", "bytes", "lookups hit", "rows hit")
    caches = text_table(f"Caches{within}: the most read rows", ["table"], headings)
    moved = text_table(
        "Rows of a step, read from the backing store and written back",
        ["table"],
        ("plain", "coalesced", "cached", "plain / cached"),
    )
    for table in tables[:_LINES]:
        _add(caches, moved, table.load.name, [table])
    if len(tables) > 1:
        caches.add_section()
        moved.add_section()
        _add(caches, moved, f"all {len(tables)}", tables)
    limit = f"no further row is read more than once in {STEPS:,} steps"
    if plan.is_full:
        limit = "the memory is full"
    if plan.is_full and report.shared is not None:
        size = text_utils.size_text(report.shared.sample)
        limit = f"a smaller batch would cost more than further rows save ({size} per sample)"
    parts: list[RenderableType] = [
        topology_line(report.topology, report.spec),
        Text(
            f"{plan.batch_size:,} samples per step ({plan.batch_size // ranks:,} rows per rank), "
            f"{plan.optimizer}; reads of rows: {report.source}"
        ),
        "",
        caches,
        Text(f"the cache ends where {limit}"),
        "",
        moved,
    ]
    in_flight = sum(t.traffic.unique_rows * t.traffic.row_bytes for t in tables)
    if report.memory is not None and report.memory < in_flight:
        warning = (
            f"warning: the distinct rows of one batch need {text_utils.size_text(in_flight)}, but "
            f"--memory is {text_utils.size_text(report.memory)}. Use smaller batches or more "
            "memory."
        )
        parts.append(Text(warning, style="yellow"))
    return Group(*parts)


def _add(caches: Table, moved: Table, name: str, tables: Sequence[CachedTable]) -> None:
    """Add a row on the embedding tables ``tables`` to the printed tables ``caches``, ``moved``."""
    rows = sum(table.load.num_embeddings for table in tables)
    cached = sum(table.cached for table in tables)
    lookups = sum(table.traffic.lookups for table in tables)
    hit = sum(t.traffic.lookups * t.load.access.covered(t.cached) for t in tables)
    unique = sum(table.traffic.unique_rows for table in tables)
    caches.add_row(
        name,
        f"{rows:,}",
        f"{cached:,}",
        f"{cached / rows:.1%}",
        text_utils.size_text(sum(table.cached_bytes for table in tables)),
        f"{hit / lookups:.1%}",
        f"{sum(table.traffic.hits for table in tables) / unique:.1%}",
    )
    num_bytes = _bytes(tables)
    less = num_bytes["plain"] / num_bytes["cached"] if num_bytes["cached"] else None
    moved.add_row(
        name,
        *map(text_utils.size_text, num_bytes.values()),
        "all" if less is None else f"{less:.1f}",
    )
