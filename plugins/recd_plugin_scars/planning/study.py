"""The report of ``recd plan --cache``: the cache of each table, and the remaining traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_scars.planning.load import TableLoad, TableTraffic
from recd_plugin_scars.planning.order import Memory, Optimum, RowOrder, StepCosts
from recd_plugin_scars.planning.plan import (
    STEPS,
    CachedTable,
    CachePlan,
    measured_rates,
    rates_of,
    row_order,
)
from recd_plugins.api import (
    AccessProfile,
    RecdError,
    RegistryData,
    RunConfig,
    SetupError,
    measure_compute,
    model_tables,
    study,
    text_table,
    text_utils,
    topologies,
    topology_line,
    wrapped_dataset,
)
from recd_plugins.api import Table as ModelTable

#: Why the cache is not larger: its memory is full; no further row is read often enough; the batch
#: would be too small; not one sample more has room.
Limit = Literal["memory", "useful", "batch", "room"]

# Up to this many tables have a line each; with more tables, those with the most traffic.
_LINES = 16
_LIMITS = {
    "memory": "the memory is full",
    "useful": "no further row is read more than once in {steps:,} steps",
    "batch": "further rows would cost more, by a smaller batch, than they save",
    "room": "no further row has room beside the least batch",
}


@dataclass(frozen=True)
class CacheSize:
    """The chosen cache size, summed over tables and ranks.

    Attributes:
        rows, bytes: cached rows and their bytes.
        batch_size: samples per step.
        moved: bytes per step moved in both directions.
        seconds: seconds of a rank per sample (f).
    """

    rows: int
    bytes: float
    batch_size: float
    moved: float
    seconds: float


@dataclass(frozen=True)
class CachePlanReport:
    """A plan of caches with the reasons for its size.

    Attributes:
        source: where the read counts come from.
        lru_bytes: bytes per step with LRU caches of the same sizes.
        memory: memory budget over all ranks; None means no limit.
        shared: memory shared by rows and batch, if the batch size was searched.
        limit: why the cache is not larger.
        steps: a useful row is read more than once in so many steps.
    """

    topology: str
    spec: topologies.TopologySpec
    source: str
    plan: CachePlan
    lru_bytes: float
    memory: float | None
    shared: Memory | None
    chosen: CacheSize
    limit: Limit
    steps: int
    warnings: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        rates = rates_of(self.spec)
        tables = list(self.plan.tables.values())
        return {
            "topology": {"name": self.topology, "ranks": self.spec.world_size},
            "costs": {**rates.model_dump(), "measured": measured_rates(self.spec) is not None},
            "reads": self.source,
            "batch_size": self.plan.batch_size,
            "memory_bytes": self.memory,
            "sample_bytes": self.shared.sample if self.shared else None,
            "steps": self.steps,
            "limit": self.limit,
            "tables": {table.load.name: _table(table) for table in tables},
            "bytes_per_step": traffic_bytes([table.traffic for table in tables])
            | {"lru": self.lru_bytes},
            "chosen": asdict(self.chosen),
            "warnings": list(self.warnings),
        }


def traffic_bytes(tables: Sequence[TableTraffic]) -> dict[str, float]:
    """Return the bytes read and written per step, summed over all ``tables``."""
    return {
        "plain": sum(table.plain_bytes for table in tables),
        "coalesced": sum(table.coalesced_bytes for table in tables),
        "cached": sum(table.cached_bytes for table in tables),
        "both": sum(table.bytes for table in tables),
    }


def render(report: CachePlanReport) -> RenderableType:
    """Render ranks and costs, the cache of each table, and the traffic per step."""
    within = (
        ""
        if report.memory is None or report.shared
        else f" within {text_utils.size_text(report.memory)}"
    )
    parts: list[RenderableType] = [
        topology_line(report.topology, report.spec),
        _assumptions(report),
        "",
        _by_table(
            report,
            f"Caches{within}: the most read rows",
            ("rows", "useful", "cached", "share", "bytes", "lookups hit", "rows hit"),
            _cache_cells,
        ),
        Text(f"the cache ends where {_LIMITS[report.limit].format(steps=report.steps)}"),
        "",
        _by_table(
            report,
            "Rows of a step, read from the backing store and written back",
            ("plain", "coalesced", "cached", "both", "plain / both"),
            _traffic_cells,
            f"LRU caches of the same sizes: about {text_utils.size_text(report.lru_bytes)} in all",
        ),
    ]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in report.warnings]
    return Group(*parts)


def _table(table: CachedTable) -> dict[str, Any]:
    traffic = table.traffic
    return {
        "rows": table.load.num_embeddings,
        "dim": table.load.embedding_dim,
        "read_rows": table.load.read_rows,
        "useful_rows": table.useful,
        "cached_rows": table.cached,
        "load_factor": table.load_factor,
        "cached_bytes": table.cached_bytes,
        "lookups": traffic.lookups,
        "unique_rows": traffic.unique_rows,
        "misses": traffic.misses,
        "hit_rate": traffic.hit_rate,
        "lookups_hit": table.load.covered(table.cached),
        "bytes_per_step": traffic_bytes([traffic]),
    }


def _assumptions(report: CachePlanReport) -> Text:
    rates, ranks = rates_of(report.spec), report.spec.world_size
    searched = "" if report.shared is None else ", searched"
    kind = "measured" if measured_rates(report.spec) else "assumed"
    lines = [
        f"{report.plan.batch_size:,} samples a step ({report.plan.batch_size // ranks:,} rows a "
        f"rank{searched}), {report.plan.optimizer}; reads of rows: {report.source}",
        f"costs, {kind}: {rates.step_seconds * 1e3:.3g} ms an iteration (tau), "
        f"{rates.sample_seconds * 1e6:.3g} us a sample, {rates.byte_seconds * 1e9:.3g} s a GB of "
        "rows fetched and written back",
    ]
    if report.shared is not None:
        lines.append(
            f"memory for rows and batch: {text_utils.size_text(report.shared.total)}, "
            "of which a sample takes "
            f"{text_utils.size_text(report.shared.sample)}"
        )
    return Text("\n".join(lines))


def _by_table(
    report: CachePlanReport,
    title: str,
    headings: Sequence[str],
    cells: Callable[[Sequence[CachedTable]], Sequence[str]],
    caption: str | None = None,
) -> Table:
    """Return one line per table, those with the most traffic first, and a total."""
    tables = sorted(report.plan.tables.values(), key=lambda t: -t.traffic.coalesced_bytes)
    rows = ((table.load.name, *cells([table])) for table in tables[:_LINES])
    lines = text_table(title, ["table"], headings, rows, caption=caption)
    if len(tables) > 1:
        lines.add_section()
        lines.add_row(f"all {len(tables)}", *cells(tables))
    return lines


def _cache_cells(tables: Sequence[CachedTable]) -> Sequence[str]:
    rows = sum(table.load.num_embeddings for table in tables)
    cached = sum(table.cached for table in tables)
    lookups = sum(table.traffic.lookups for table in tables)
    hit = sum(table.traffic.lookups * table.load.covered(table.cached) for table in tables)
    unique = sum(table.traffic.unique_rows for table in tables)
    return (
        f"{rows:,}",
        f"{sum(table.useful or 0 for table in tables):,}",
        f"{cached:,}",
        f"{cached / rows:.1%}",
        text_utils.size_text(sum(table.cached_bytes for table in tables)),
        f"{hit / lookups:.1%}",
        f"{sum(table.traffic.hits for table in tables) / unique:.1%}",
    )


def _traffic_cells(tables: Sequence[CachedTable]) -> Sequence[str]:
    moved = traffic_bytes([table.traffic for table in tables])
    less = f"{moved['plain'] / moved['both']:.1f}" if moved["both"] else "all"
    return (*map(text_utils.size_text, moved.values()), less)


@dataclass(frozen=True)
class CacheQuestion:
    """Options of ``recd plan --cache``.

    Attributes:
        memory: bytes of fast memory over all ranks for cached rows, and for the batch if its size
            is searched. None means no limit.
        batch_size: rows per rank; None searches for the best.
        largest_batch: maximum rows per rank, if the batch size is searched.
        sample_bytes: a, memory per sample; None estimates it.
        profile: file of an access profile; None counts the reads of the data.
        profile_rows: rows of the training split that are counted; None: all.
        steps: a useful row is read more than once in so many steps.
        lookahead: whether rows are fetched during the previous batch.
    """

    memory: int | None = None
    batch_size: int | None = None
    largest_batch: int = 1 << 16
    sample_bytes: int | None = None
    profile: Path | None = None
    profile_rows: int | None = 1 << 16
    steps: int = STEPS
    lookahead: bool = True

    @property
    def held(self) -> int:
        return int(self.lookahead)


def study_caches(
    registry: RunConfig,
    topology: str,
    spec: topologies.TopologySpec,
    question: CacheQuestion,
    say: Callable[[str], None],
) -> CachePlanReport:
    """Plan caches for the tables of the registry's cache entries, or for all tables if it has none.

    Raises:
        RecdError: registry, data and model do not match.
        DataError: the profile is for other tables.
        SetupError: the memory cannot hold one sample per rank.
    """
    wrapped_dataset(registry).prepare()
    data = RegistryData(registry)
    tables = cached_tables(registry)
    if question.profile is None:
        say(f"counting the reads of {len(tables)} tables")
        profile = data.access(tables, question.profile_rows)
    else:
        profile = AccessProfile.load(question.profile)
    loads = {
        table.name: TableLoad(
            profile.covering(table.name, table.num_embeddings), table.embedding_dim
        )
        for table in tables
    }
    say("choosing how much to cache")
    order = row_order(loads, registry.training.optimizer)
    ranks = spec.world_size
    given = (question.batch_size or registry.training.batch_size) * ranks
    useful = order.useful(question.steps * given)
    costs = rates_of(spec).costs(ranks)
    if question.batch_size is not None:
        shared = Memory(np.inf, 1.0, largest_batch=given)
        room = useful if question.memory is None else order.fitting(question.memory)
        place = min(useful, room)
        limit: Limit = "useful" if place == useful else "memory"
        batch_size = given
    else:
        shared = _shared(registry, spec, question, loads, data, say)
        best = order.best(shared, costs, useful)
        place, limit = best.place, _limit(order, best, shared, useful)
        batch_size = int(best.batch_size) // ranks * ranks
    cached = dict(zip(loads, order.rows(place), strict=True))

    def planned(policy: str) -> CachePlan:
        return CachePlan.of(
            loads,
            cached,
            batch_size=batch_size,
            optimizer=registry.training.optimizer,
            useful=dict(zip(loads, order.rows(useful), strict=True)),
            held=question.held,
            policy="lru" if policy == "lru" else "static",
        )

    plan = planned("static")
    lru = traffic_bytes([table.traffic for table in planned("lru").tables.values()])
    return CachePlanReport(
        topology=topology,
        spec=spec,
        source=profile.source,
        plan=plan,
        lru_bytes=lru["both"],
        memory=question.memory,
        shared=shared if question.batch_size is None else None,
        chosen=_size(order, place, shared, costs),
        limit=limit,
        steps=question.steps,
        warnings=_warnings(plan, question, order.bytes(useful)),
    )


def cached_tables(registry: RunConfig) -> list[ModelTable]:
    """Return the tables of the registry's cache entries, or without entries all tables."""
    import torch

    from recd_plugins.api import build_model

    if not registry.has_model:
        raise RecdError(f"{registry.path}: no model: section says which tables there are; add one")
    with torch.device("meta"):
        tables = model_tables.tables_of(build_model(registry, registry.dataset.schema()))
    claimed = registry.claim("cache", [table.name for table in tables])
    return [table for table in tables if not claimed or table.name in claimed]


def _shared(
    registry: RunConfig,
    spec: topologies.TopologySpec,
    question: CacheQuestion,
    loads: Mapping[str, TableLoad],
    data: RegistryData,
    say: Callable[[str], None],
) -> Memory:
    """Return the memory for rows and batch. A sample needs activations and fetched rows."""
    assert question.memory is not None, "a batch size is searched in some memory"
    ranks, sample = spec.world_size, question.sample_bytes
    if sample is None:
        say("counting what the model keeps of a sample")
        batch_size = registry.training.batch_size
        candidate = study.with_plugins(replace(registry, cache=(), wrappers=()), spec, data)
        kept = candidate.activation_bytes(measure_compute(registry), batch_size) / batch_size
        widths = [load.lookups * load.embedding_dim * 4 for load in loads.values()]
        sample = round(kept + (1 + question.held) * sum(widths))
    if question.memory < sample * ranks:
        raise SetupError(
            f"--memory {text_utils.size_text(question.memory)} has no room for one "
            "sample of each of "
            f"{ranks} ranks, of which each takes {text_utils.size_text(sample)}; "
            "give more, or say what a "
            "sample takes with --sample-bytes"
        )
    return Memory(
        question.memory,
        max(1, sample),
        least_batch=ranks,
        largest_batch=question.largest_batch * ranks,
    )


def _limit(order: RowOrder, best: Optimum, shared: Memory, useful: int) -> Limit:
    if best.place == useful:
        return "useful"
    room = order.fitting(shared.total - shared.sample * shared.least_batch)
    return "room" if best.place == room else "batch"


def _size(order: RowOrder, place: int, shared: Memory, costs: StepCosts) -> CacheSize:
    cached = order.bytes(place)
    batch_size = shared.batch_size(cached)
    return CacheSize(
        rows=place,
        bytes=cached,
        batch_size=batch_size,
        moved=2 * order.fetched_bytes(place, batch_size),
        seconds=order.cost(place, shared, costs),
    )


def _warnings(plan: CachePlan, question: CacheQuestion, useful_bytes: float) -> list[str]:
    tables = plan.tables.values()
    found = []
    in_flight = sum(table.traffic.unique_rows * table.traffic.row_bytes for table in tables)
    if not useful_bytes:
        found.append(
            f"no row is read more than once in {question.steps:,} steps: nothing is worth caching"
        )
    if question.memory is not None and question.memory < in_flight:
        found.append(
            f"{text_utils.size_text(question.memory)} is less than the "
            f"{text_utils.size_text(in_flight)} that the "
            "distinct rows of one batch take, which are in the fast memory while they are computed "
            "with: smaller batches, or more memory"
        )
    samples = min(table.load.access.samples for table in tables)
    if 1 < samples < plan.batch_size:
        found.append(
            f"the profile has seen {samples:,} samples, less than the {plan.batch_size:,} of a "
            "step: rows that it has not seen are taken for never read"
        )
    return found
