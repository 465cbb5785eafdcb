"""What would become of the tables of a trainer's model, without training it."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from recd_plugins.distributed.table_report import (
    DENSE,
    ShardedTables,
    TableLine,
    left_alone,
    optimizer_in_words,
)
from recd_plugins.drop_in.wrap import Wrapped
from recd_plugins.model_tables import embedding_modules
from recd_plugins.planning.table_optimizers import TableOptimizer, table_optimizers
from recd_plugins.words import shortened


@dataclass(frozen=True)
class PlannedTables:
    """The tables of a model as they would be sharded, and its features as they would come.

    Attributes:
        tables: as ``describe_tables`` has them of a sharded model.
        deduplicated: features whose equal rows ``Wrapped.dedup`` stores once.
        plain: features that are looked up as they come, with why.
    """

    tables: ShardedTables
    deduplicated: tuple[str, ...]
    plain: dict[str, str]

    def __str__(self) -> str:
        lines = [str(self.tables), "", "features"]
        if self.deduplicated:
            lines.append(f"  deduplicated by dedup(loader): {shortened(self.deduplicated)}")
        lines += [f"  as it comes: {feature}, {why}" for feature, why in self.plain.items()]
        return "\n".join(lines)


def planned_tables(ready: Wrapped, world_size: int) -> PlannedTables:
    """What the planner makes of a model on so many ranks of machines like this one.

    Raises:
        SetupError: there is no plan, or sharders and model do not go together.
    """
    sharders = ready.sharders()
    plan = ready.planner(world_size=world_size).plan(ready.model, sharders)
    by_type = {sharder.module_type: sharder for sharder in sharders}
    lines: list[TableLine] = []
    for module in embedding_modules(ready.model):
        planned = plan.plan.get(module.path)
        if planned is None:
            lines += left_alone(module)
            continue
        # Of this module: tables of one name may be trained otherwise in another.
        optimizers = table_optimizers(module.shardable, sharders)
        by = f"{type(by_type[type(module.shardable)]).__name__} {module.path}".rstrip()
        for table in module.tables:
            sharding = planned[table.name]
            dense = sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value
            lines.append(
                TableLine(
                    table.name,
                    table.num_embeddings,
                    table.embedding_dim,
                    sharding.sharding_type,
                    sharding.compute_kernel,
                    DENSE if dense else _in_words(optimizers[table.name]),
                    by,
                )
            )
    pooled = ready.dedup.pooled
    return PlannedTables(
        ShardedTables(tuple(lines)),
        tuple(sorted(pooled.names)),
        {
            name: why
            for name, why in {**pooled.expanded, **pooled.unsharded}.items()
            if name not in pooled.names
        },
    )


def _in_words(optimizer: TableOptimizer) -> str:
    if optimizer.in_backward:
        return f"{optimizer.in_backward}, in backward"
    return optimizer_in_words(optimizer.fused_params)
