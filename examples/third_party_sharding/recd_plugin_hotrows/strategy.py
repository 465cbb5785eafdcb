"""Cost estimates and run report of tables with copies of hot rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from recd_plugins.api import Section, StepShape, Table, TableStrategy, TrainedRun

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import ParameterSharding

    from recd_plugins.api import stage_costs

# Names of traffic in reports: gradients of copies; ids, rows and gradients of sharded tables.
HOT, SHARDED = "hot_rows", "sharded_rows"


class HotTable(NamedTuple):
    """Number of copied rows, the fraction of ids that read them, and the embedding dimension."""

    rows: int
    share: float
    width: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the copies on one rank."""
        return 4 * self.rows * self.width


class HotStrategy(TableStrategy):
    """Table strategy with the costs of row copies and of the all-reduce of their gradients."""

    def __init__(self, tables: Mapping[str, HotTable], world_size: int) -> None:
        self.tables, self.world_size = tables, world_size

    def needs_stock_kernels(self) -> Mapping[str, str]:
        return dict.fromkeys(self.tables, "has copies of its rows, so it cannot be cached")

    def sharded_share(self, table: str) -> float:
        return 1 - self.tables[table].share if table in self.tables else 1.0

    def memory_of_rank(self, *_: Any) -> Mapping[str, int]:
        """Return the bytes of the copies and their gradients on each rank."""
        return {"hot rows": sum(2 * table.num_bytes for table in self.tables.values())}

    def activation_bytes(self, table: Table, ids: float) -> float:
        hot = self.tables.get(table.name)
        return 4 * hot.width * hot.share * ids if hot else 0.0

    def work(
        self, table: Table, _: ParameterSharding, step: StepShape
    ) -> Iterable[tuple[slice, stage_costs.StepCost]]:
        """Yield the cost of lookups in the copies and of the all-reduce, on every rank."""
        from recd_plugins.api import stage_costs

        if (hot := self.tables.get(table.name)) is not None:
            ids = hot.share * step.profile.ids(table, step.batch_size)
            reduced = 2 * (step.world_size - 1) / step.world_size * hot.num_bytes
            looked_up = 4 * hot.width * ids
            work = stage_costs.StepCost(
                ids_looked_up=ids, bytes_looked_up=looked_up, bytes_reduced=reduced
            )
            yield slice(None), work

    def figures(self, table: str) -> Mapping[str, Any]:
        hot = self.tables.get(table)
        return {"hot_rows": hot.rows, "hot_share": hot.share} if hot else {}

    def describe(self, table: str) -> Sequence[str]:
        return [f"{self.tables[table].rows:,} hot rows"] if table in self.tables else []

    def channels(self, model: nn.Module) -> Mapping[Any, str]:
        import torch.distributed as dist

        from recd_plugin_hotrows.sharded import ShardedHotCollection

        modules = [m for m in model.modules() if isinstance(m, ShardedHotCollection)]
        named = {(module.group.group_name, "all_reduce"): HOT for module in modules}
        return {**named, (dist.group.WORLD.group_name, "all_to_all"): SHARDED} if named else {}

    @classmethod
    def sections(cls, parts: Sequence[Self], run: TrainedRun) -> Sequence[Section]:
        from recd_plugins.api import step_costs

        context, sent = run.context, run.sent or {}
        copies = sum(table.num_bytes for part in parts for table in part.tables.values())
        predicted = step_costs.bytes_of_tables(
            run.tables,
            {name: each for module in run.plan.plan.values() for name, each in module.items()},
            context.data.profile(),
            batch_size=context.batch_size,
            world_size=context.world_size,
            parts=parts,
        )
        reduced = 2 * (context.world_size - 1) * copies
        of_channels = {HOT: reduced, SHARDED: sum(predicted.values())}
        return [Sent({name: (sent.get(name), each) for name, each in of_channels.items()})]


class Sent(Section):
    """Report section with counted and predicted bytes per step, summed over ranks."""

    name = "hot_rows"

    def __init__(self, sent: Mapping[str, tuple[float | None, float]]) -> None:
        self.sent = sent

    def as_json(self) -> Any:
        return {
            name: {"counted": counted, "predicted": predicted}
            for name, (counted, predicted) in self.sent.items()
        }

    def shown(self, run: str) -> Sequence[str]:
        return [
            f"{run} {name}: {'-' if counted is None else f'{counted:,.0f}'} bytes per step, "
            f"predicted {predicted:,.0f}".strip()
            for name, (counted, predicted) in self.sent.items()
        ]
