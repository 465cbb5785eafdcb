"""Section ``caches`` of a run report: observed and predicted cache traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from rich.console import RenderableType
from rich.table import Table
from torch import nn
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingType

from recd_plugin_scars.planning import CachedTable
from recd_plugin_scars.runtime.kernel import cache_traffic
from recd_plugin_scars.runtime.policies import TableCache
from recd_plugins.api import Section, TrainedRun, text_utils

_COLUMN_WISE = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)


@dataclass(frozen=True)
class StepTraffic:
    """Mean cache traffic of one table per step.

    ``hits`` and ``misses`` are numbers of distinct rows. Bytes include weights and optimizer state.
    With column-wise sharding, each column shard counts separately.
    """

    lookups: float
    unique_rows: float
    hits: float
    misses: float
    bytes_read: float
    bytes_written: float

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class CachedTableReport:
    """Size of the cache of one table, with observed and predicted traffic if available."""

    name: str
    policy: str
    num_embeddings: int
    cached_rows: int
    observed: StepTraffic | None
    predicted: StepTraffic | None

    @property
    def share(self) -> float:
        return self.cached_rows / self.num_embeddings

    @property
    def ratio(self) -> float | None:
        return _ratio(_sum([self.observed]), _sum([self.predicted]))


@dataclass(frozen=True)
class CacheReport(Section):
    """Report section with the caches of all cached tables of a run."""

    name: ClassVar[str] = "caches"

    tables: tuple[CachedTableReport, ...]

    @property
    def observed_bytes(self) -> float | None:
        """Return observed bytes read and written per step; None if the run has no steps."""
        return _sum([table.observed for table in self.tables])

    @property
    def predicted_bytes(self) -> float | None:
        """Return predicted bytes read and written per step; None if a table has no prediction."""
        return _sum([table.predicted for table in self.tables])

    def as_json(self) -> dict[str, Any]:
        tables = {}
        for table in self.tables:
            values = asdict(table)
            name = values.pop("name")
            tables[name] = values | {"share": table.share, "backing_store_ratio": table.ratio}
        total = {"observed": self.observed_bytes, "predicted": self.predicted_bytes}
        return {"tables": tables, "backing_store_bytes": total}

    def shown(self, run: str) -> Sequence[RenderableType]:
        title = "caches: traffic per step, summed over ranks"
        table = Table(title=f"{run}, {title}" if run else title)
        table.add_column("table")
        for heading in ("rows cached", "hits", "misses", "row bytes", "predicted", "ratio"):
            table.add_column(heading, justify="right")
        for cached in self.tables:
            seen, expected = cached.observed, cached.predicted
            table.add_row(
                cached.name,
                f"{cached.cached_rows:,} ({cached.share:.2%})",
                *((_number(seen.hits), _number(seen.misses)) if seen else ("-", "-")),
                *_bytes(_sum([seen]), _sum([expected])),
            )
        if len(self.tables) > 1:
            table.add_section()
            table.add_row("all", "", "", "", *_bytes(self.observed_bytes, self.predicted_bytes))
        policies = sorted({cached.policy for cached in self.tables})
        table.caption = f"distinct rows; bytes read and written\npolicy {', '.join(policies)}"
        return [table]


def counted_by_step(model: nn.Module, steps: int) -> dict[str, StepTraffic]:
    """Return a dict from cached table to this rank's mean traffic per step."""
    return {
        name: StepTraffic(**{f.name: getattr(counts, f.name) / steps for f in fields(StepTraffic)})
        for name, counts in cache_traffic(model).items()
        if steps
    }


def report_caches(
    caches: Mapping[str, TableCache], expected: Mapping[str, CachedTable], run: TrainedRun
) -> CacheReport:
    """Return the report of a training run on observed and predicted cache traffic."""
    observed = merged(run.observed)
    shardings = {
        name: sharding
        for module in run.plan.plan.values()
        if isinstance(module, EmbeddingModuleShardingPlan)
        for name, sharding in module.items()
    }
    return CacheReport(
        tuple(
            CachedTableReport(
                table.name,
                caches[table.name].policy_name,
                table.num_embeddings,
                caches[table.name].num_cached_rows(table.num_embeddings),
                observed.get(table.name),
                _predicted(expected.get(table.name), shardings[table.name]),
            )
            for table in run.tables
            if table.name in caches
        )
    )


def merged(ranks: Sequence[Mapping[str, StepTraffic]]) -> dict[str, StepTraffic]:
    """Return a dict from table name to its traffic, summed over ``ranks``."""
    found: dict[str, Counter[str]] = {}
    for rank in ranks:
        for name, part in rank.items():
            found.setdefault(name, Counter()).update(asdict(part))
    return {name: StepTraffic(**sums) for name, sums in found.items()}


def _predicted(table: CachedTable | None, sharding: ParameterSharding) -> StepTraffic | None:
    if table is None:
        return None
    expected = table.traffic
    if sharding.sharding_type in _COLUMN_WISE:
        expected = expected.column_wise(len(sharding.ranks or ()))
    return StepTraffic(**{f.name: getattr(expected, f.name) for f in fields(StepTraffic)})


def _sum(parts: Sequence[StepTraffic | None]) -> float | None:
    known = [part.bytes for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _ratio(observed: float | None, predicted: float | None) -> float | None:
    return observed / predicted if observed is not None and predicted else None


def _bytes(observed: float | None, predicted: float | None) -> tuple[str, str, str]:
    ratio = _ratio(observed, predicted)
    return (
        text_utils.bytes_text(observed),
        text_utils.bytes_text(predicted),
        "" if ratio is None else f"{ratio:.3f}",
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.2g}"
