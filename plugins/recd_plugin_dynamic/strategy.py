"""Memory and run report of dynamic tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from recd_plugins.api import PlanContext, Section, TableStrategy, TrainedRun, text_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn

    from recd_plugin_dynamic.table import DynamicTable


class DynamicStrategy(TableStrategy):
    """Table strategy of dynamic tables, keyed by name."""

    follows_optimizers = True

    def __init__(self, tables: Mapping[str, DynamicTable], context: PlanContext) -> None:
        self.tables, self._context = tables, context

    def memory_of_rank(self, ranks_per_node: int, optimizer: str) -> Mapping[str, int]:  # noqa: ARG002
        """Return the bytes of the indices of ids; none on CUDA, because they are in host memory."""
        if self._context.device_type != "cpu":
            return {}
        ranks = self._context.world_size
        return {
            "indices of ids": sum(
                table.index(0, 1).num_bytes * table.num_buckets // ranks
                for table in self.tables.values()
            )
        }

    def describe(self, table: str) -> Sequence[str]:
        if (layout := self.tables.get(table)) is None:
            return []
        return [
            f"dynamic: {layout.capacity:,} ids in {layout.num_buckets} buckets, "
            f"eviction: {layout.policy.name}"
        ]

    @classmethod
    def observe(cls, parts: Sequence[Self], model: nn.Module, steps: int) -> dict[str, Any]:  # noqa: ARG003
        from recd_plugin_dynamic.runtime.sharded import rank_indices

        return {name: index.counts() for name, index in rank_indices(model)}

    @classmethod
    def sections(cls, parts: Sequence[Self], run: TrainedRun) -> Sequence[Section]:
        tables = {name: table for part in parts for name, table in part.tables.items()}
        reports = {}
        for name, table in tables.items():
            ranks = [rank[name] for rank in run.observed]
            counts = {key: sum(rank[key] for rank in ranks) for key in ranks[0]}
            reports[name] = {"capacity": table.capacity, **counts}
        return [DynamicTablesReport(reports)]


@dataclass(frozen=True)
class DynamicTablesReport(Section):
    """Report section about the ids of dynamic tables, with counts summed over ranks."""

    name: ClassVar[str] = "dynamic_tables"

    tables: Mapping[str, Mapping[str, int]]

    def as_json(self) -> dict[str, Any]:
        return dict(self.tables)

    def shown(self, run: str) -> Sequence[RenderableType]:
        title = "dynamic tables"
        cells = [
            [
                name,
                f"{each['capacity']:,}",
                f"{each['ids']:,} ({each['ids'] / each['capacity']:.0%})",
            ]
            + [f"{each[key]:,}" for key in ("inserted", "evicted", "not_admitted")]
            for name, each in self.tables.items()
        ]
        return [
            text_table(
                f"{run}, {title}" if run else title,
                ["table"],
                ["capacity", "ids", "inserted", "evicted", "not admitted"],
                cells,
                caption="not admitted: ids of a batch that got no row, summed over steps",
            )
        ]
