"""Plans how a custom model's tables would be sharded, without training it."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from recd_plugins.drop_in.wrap import Wrapped
from recd_plugins.interfaces.model_tables import embedding_modules
from recd_plugins.planning.constraints import table_optimizers
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.text import shortened
from recd_plugins.sharding.table_report import (
    DENSE,
    ShardedTables,
    TableLine,
    describe_optimizer,
    left_alone,
)


@dataclass(frozen=True)
class PlannedTables:
    """Planned tables, deduplicated features, and why each other feature is not deduplicated."""

    tables: ShardedTables
    deduplicated: tuple[str, ...]
    plain: dict[str, str]

    def __str__(self) -> str:
        lines = [str(self.tables), "", "features"]
        if self.deduplicated:
            lines.append(f"  deduplicated by dedup(loader): {shortened(self.deduplicated, str)}")
        lines += [f"  not deduplicated: {feature}, {why}" for feature, why in self.plain.items()]
        return "\n".join(lines)


def planned_tables(ready: Wrapped, world_size: int) -> PlannedTables:
    """Plan a model of ``wrap`` for ``world_size`` ranks on machines like this one."""
    sharders = ready.sharders()
    plan = ready.planner(world_size=world_size).plan(ready.model, sharders)
    by_type = {sharder.module_type: sharder for sharder in sharders}
    lines: list[TableLine] = []
    for module in embedding_modules(ready.model):
        planned = plan.plan.get(module.path)
        if planned is None:
            lines += left_alone(module)
            continue
        # Only tables of this module: another module may train a table of the same name differently.
        optimizers = table_optimizers(module.shardable, sharders)
        by = f"{type(by_type[type(module.shardable)]).__name__} {module.path}".rstrip()
        for table in module.tables:
            sharding = planned[table.name]
            trained = optimizers[table.name]
            update = describe_optimizer(trained.fused_params)
            if trained.in_backward:
                update = f"{trained.in_backward}, in backward"
            if sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value:
                update = DENSE
            lines.append(
                TableLine(
                    table.name,
                    table.num_embeddings,
                    table.embedding_dim,
                    sharding.sharding_type,
                    sharding.compute_kernel,
                    update,
                    by,
                )
            )
    pooled = ready.dedup.pooled
    return PlannedTables(
        ShardedTables(tuple(lines)),
        tuple(sorted(pooled.names)),
        {name: why for name, why in pooled.others.items() if name not in pooled.names},
    )


def model_of(name: str) -> nn.Module:
    """Import and call ``module:function`` to build a model, also from the current directory."""
    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise SetupError(
            f"--model {name!r} has no function name. Use MODULE:FUNCTION, such as "
            "trainer:build_model."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        model: nn.Module = getattr(importlib.import_module(module_name), function_name)()
    except Exception as error:
        raise SetupError(
            f"--model {name!r}: the model cannot be built ({type(error).__name__}: {error}). Check "
            "the module and the function."
        ) from error
    return model
