"""Report of the command ``recd plan``, as text and JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table as TextTable
from rich.text import Text

from recd_plugins.interfaces import Section
from recd_plugins.interfaces.data_profile import DataProfile
from recd_plugins.interfaces.step_cost import STAGES, StageTimes
from recd_plugins.planning.topologies import TopologySpec, costs_source
from recd_plugins.report.tables import text_table
from recd_plugins.runtime.text import size_text

_Bytes = NDArray[np.int64]
# With more tables, similar ones share a line.
_LINES = 16


@dataclass(frozen=True)
class PlannedTable:
    """The sharding of one table.

    Attributes:
        bytes_per_rank: bytes of its largest shard, with optimizer state, inputs and outputs.
        dedupe_factor: number of ids of its features divided by the number of ids sent.
        cached_rows: rows in fast memory; None without a cache.
        coalesced: whether each distinct id is sent only once.
        figures, words: metrics (JSON values) and lines of text that plugins report for the table.
    """

    name: str
    features: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    pooled: bool
    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...]
    bytes_per_rank: int
    dedupe_factor: float
    cached_rows: int | None = None
    coalesced: bool = False
    figures: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the table's values for ``--json``."""
        shown = asdict(self)
        del shown["words"]
        return shown.pop("figures") | shown

    @property
    def shown(self) -> tuple[str, str, str]:
        """Return the table cells for size, sharding and kernel, as text."""
        cached = "" if self.cached_rows is None else f"\n{self.cached_rows:,} cached"
        coalesced = "\ncoalesced" if self.coalesced else ""
        size = f"{self.num_embeddings:,} x {self.embedding_dim}"
        return size, self.sharding_type + coalesced, self.compute_kernel + cached


@dataclass(frozen=True)
class VariantReport:
    """Report of one plan, with or without plugins.

    Attributes:
        batch_size, largest_batch_size: rows per rank; the largest batch is None if not searched.
        batch_step: search step; ``largest_batch_size`` plus one step does not fit.
        memory: dict from component to bytes per rank, ``[world_size]``, in GPU memory if present.
        host_memory: bytes per rank ``[world_size]`` of tables that GPUs read from host memory.
        seconds: step time per stage.
    """

    batch_size: int
    largest_batch_size: int | None
    batch_step: int | None
    tables: tuple[PlannedTable, ...]
    memory: Mapping[str, _Bytes]
    host_memory: _Bytes
    seconds: StageTimes

    @property
    def memory_by_rank(self) -> _Bytes:
        """Return the bytes per rank of all memory components, ``[world_size]``."""
        return np.sum(list(self.memory.values()), axis=0, dtype=np.int64)

    def samples_per_second(self, world_size: int) -> float:
        """Return the throughput of all ranks, in samples per second."""
        return world_size * self.batch_size / self.seconds.total

    def as_json(self) -> dict[str, Any]:
        """Return the plan's values for ``--json``."""
        total = self.memory_by_rank
        return {
            "batch_size": self.batch_size,
            "largest_batch_size": self.largest_batch_size,
            "batch_step": self.batch_step,
            "tables": [table.as_json() for table in self.tables],
            "memory_bytes": {
                "max": int(total.max()),
                "mean": float(total.mean()),
                "by_rank": {name: part.tolist() for name, part in self.memory.items()},
                "host_by_rank": self.host_memory.tolist(),
            },
            "seconds": {**self.seconds.as_dict(), "total": self.seconds.total},
            "samples_per_second": self.samples_per_second(len(total)),
        }


@dataclass(frozen=True)
class PlanReport:
    """Plans with and without plugins.

    Attributes:
        plugins: the plan with plugins, as in ``recd run``.
        plain: TorchRec's plan without plugins; None if nothing fits.
        plain_problem: reason why there is no plan without plugins.
        chosen: report of a chooser such as ``use: auto``; None without a chooser.
    """

    topology: str
    spec: TopologySpec
    profile: DataProfile
    plugins: VariantReport
    plain: VariantReport | None
    plain_problem: str = ""
    wire: str = "fp32"
    chosen: Section | None = None

    @property
    def time_of_step(self) -> str:
        """Return the step time label: "predicted time" for measured costs, else "least time"."""
        return "least time" if self.spec.costs is None else "predicted time"

    @property
    def variants(self) -> dict[str, VariantReport]:
        """Return a dict from "plugins" and "plain" to the plan with and without plugins."""
        plain = {} if self.plain is None else {"plain": self.plain}
        return {"plugins": self.plugins, **plain}

    def changed(self) -> dict[tuple[str, str], list[str]]:
        """Return a dict from (sharding type without, with plugins) to names of changed tables."""
        before = {t.name: t.sharding_type for t in (self.plain.tables if self.plain else ())}
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for table in self.plugins.tables:
            # A plugin may have replaced one table by several.
            if before.get(table.name, table.sharding_type) != table.sharding_type:
                found[before[table.name], table.sharding_type].append(table.name)
        return dict(found)

    def as_json(self) -> dict[str, Any]:
        """Return the values for ``recd plan --json``."""
        size = self.plugins.batch_size
        pooled = {name: table.pooled for table in self.plugins.tables for name in table.features}
        spec = {**self.spec.model_dump(), "world_size": self.spec.world_size}
        return {
            "topology": {"name": self.topology, **spec},
            "costs": costs_source(self.spec),
            "wire": self.wire,
            "data": {
                "source": self.profile.source,
                "features": {
                    name: {
                        "length": each.length,
                        "deduplicated": each.deduplicated,
                        "dedupe_factor": each.dedupe_factor(size, pooled=pooled.get(name, True)),
                    }
                    for name, each in self.profile.features.items()
                },
            },
            "plugins": self.plugins.as_json(),
            "plain": None if self.plain is None else self.plain.as_json(),
            "plain_problem": self.plain_problem or None,
            **({} if self.chosen is None else {self.chosen.name: self.chosen.as_json()}),
        }


def render(report: PlanReport) -> RenderableType:
    """Return the report of ``recd plan`` for a terminal."""
    parts: list[RenderableType] = [
        topology_line(report.topology, report.spec),
        Text(f"lengths and dedupe factors: from {report.profile.source}"),
    ]
    if report.wire != "fp32":
        parts.append(
            Text(f"embeddings and gradients between ranks: {report.wire} (training.wire), rounded")
        )
    parts += [] if report.chosen is None else report.chosen.shown("")
    groups = _alike(report.plugins.tables)
    said = [f"{_name(some)}: {words}" for some in groups for words in some[0].words]
    parts += [_shards(report.plugins, groups), *([Text("\n".join(said))] if said else [])]
    parts += [_memory(report), _times(report), Text("\n".join(_changes(report)))]
    spaced = [piece for part in parts for piece in (part, "")]
    return Group(*spaced[:-1])


def summary(report: PlanReport) -> Text:
    """Return the topology, sharding types, memory and step time of the plan in two lines."""
    kinds = Counter(table.sharding_type for table in report.plugins.tables)
    memory, capacity = report.plugins.memory_by_rank.max(), report.spec.memory_bytes
    return Text(
        f"{topology_line(report.topology, report.spec)}\n"
        f"sharding: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}; memory of a "
        f"rank: {size_text(memory)} ({memory / capacity:.0%}); {report.time_of_step} of a step: "
        f"{_milliseconds(report.plugins.seconds.total)}. --verbose shows the plan."
    )


def topology_line(name: str, spec: TopologySpec) -> Text:
    """Return one line with the nodes, ranks, memory and bandwidths of a topology."""
    nodes = "1 node" if spec.nodes == 1 else f"{spec.nodes:,} nodes"
    ranks = "1 rank" if spec.world_size == 1 else f"{spec.world_size:,} ranks"
    across = f", {spec.inter_node_bandwidth / 1e9:.3g} across nodes" if spec.nodes > 1 else ""
    return Text(
        f"{nodes} of {name}: {ranks} on {spec.device}, {size_text(spec.memory_bytes)} each, "
        f"{spec.intra_node_bandwidth / 1e9:.3g} GB/s in a node{across}"
    )


def compressed(ranks: Iterable[int]) -> str:
    """Format ascending ranks as ranges, for example ``0-3, 8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(words[:6]) + (f" and {len(words) - 6} more" if len(words) > 6 else "")


def _shards(variant: VariantReport, groups: Sequence[Sequence[PlannedTable]]) -> TextTable:
    table = text_table(
        f"Shards, {variant.batch_size:,} rows per rank",
        ["table", "rows x dim", "sharding", "kernel", "ranks"],
        ["bytes per rank", "dedupe factor"],
    )
    for tables in groups:
        factors = sorted(f"{each.dedupe_factor:.2f}" for each in tables)
        table.add_row(
            _name(tables) + ("" if tables[0].pooled else " (sequence)"),
            *tables[0].shown,
            compressed(sorted({rank for each in tables for rank in each.ranks})),
            size_text(max(each.bytes_per_rank for each in tables)),
            "-".join(dict.fromkeys((factors[0], factors[-1]))),
        )
    return table


def _name(tables: Sequence[PlannedTable]) -> str:
    first = tables[0].name
    return first if len(tables) == 1 else f"{first} and {len(tables) - 1} more"


def _alike(tables: Sequence[PlannedTable]) -> list[list[PlannedTable]]:
    """Group tables with equal size and sharding if there are more than ``_LINES`` tables."""
    if len(tables) <= _LINES:
        return [[table] for table in tables]
    found = defaultdict(list)
    for table in tables:
        found[*table.shown, table.pooled, table.words, len(table.ranks)].append(table)
    return sorted(found.values(), key=lambda group: -max(each.bytes_per_rank for each in group))


def _memory(report: PlanReport) -> TextTable:
    variants = report.variants.values()
    headings = [heading for name in report.variants for heading in (f"{name}: max", "mean")]
    table = text_table("Memory per rank", ["memory for"], headings)

    def add(name: str, values: Iterable[float], shown: Any = size_text) -> None:
        table.add_row(name, *map(shown, values))

    no_bytes = np.zeros_like(report.plugins.host_memory)
    for component in report.plugins.memory:
        held = [(v.memory.get(component, no_bytes), v.memory_by_rank.argmax()) for v in variants]
        add(component, (value for each, at in held for value in (each[at], each.mean())))
    totals = [v for s in variants for v in (s.memory_by_rank.max(), s.memory_by_rank.mean())]
    table.add_section()
    add("total", totals)
    capacity = report.spec.memory_bytes
    add(f"of {size_text(capacity)}", totals, lambda value: f"{value / capacity:.0%}")
    if any(variant.host_memory.any() for variant in variants):
        hosts = [v for s in variants for v in (s.host_memory.max(), s.host_memory.mean())]
        add("tables in the memory of the node", hosts)
    return table


def _times(report: PlanReport) -> TextTable:
    headings = [
        f"{name} ({variant.batch_size:,} rows)" for name, variant in report.variants.items()
    ]
    headings += [] if report.plain is None else ["plugins / plain"]
    title = f"{report.time_of_step.capitalize()} of a step"
    caption = f"Costs: {costs_source(report.spec)}"
    table = text_table(title, ["stage"], headings, caption=caption)

    def add(name: str, values: Sequence[float], shown: Any) -> None:
        ratio = [f"{values[0] / values[1]:.2f}" if values[1] else "-"] if len(values) > 1 else []
        table.add_row(name, *map(shown, values), *ratio)

    variants = report.variants.values()
    for stage in STAGES:
        values = [getattr(variant.seconds, stage) for variant in variants]
        add(stage.replace("_", "-"), values, _milliseconds)
    table.add_section()
    add("total", [variant.seconds.total for variant in variants], _milliseconds)
    if report.spec.costs is not None:  # a lower bound of the time gives no throughput
        rates = [variant.samples_per_second(report.spec.world_size) for variant in variants]
        add("samples per second", rates, lambda rate: f"{rate:,.0f}")
    return table


def _changes(report: PlanReport) -> Iterator[str]:
    plain, mine = report.plain, report.plugins
    if plain is None:
        yield f"Without the plugins {report.plain_problem}"
        return
    yield "Differences from the plan of plain TorchRec:"
    if mine.largest_batch_size and plain.largest_batch_size:
        more = mine.largest_batch_size / plain.largest_batch_size
        yield (
            f"  largest batch of a rank: {plain.largest_batch_size:,} -> "
            f"{mine.largest_batch_size:,} rows ({more:.2f}x), searched in steps of "
            f"{plain.batch_step:,} and {mine.batch_step:,} rows"
        )
    changed = report.changed().items()
    for (before_type, after_type), names in changed:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"  sharding: {names[0]}{others}: {before_type} -> {after_type}"
    if not changed:
        yield "  sharding: all tables have the same sharding type"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms"
