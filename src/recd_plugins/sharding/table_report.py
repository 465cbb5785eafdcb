"""Report of a model's embedding tables: sharding, kernel, optimizer and sharding module."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module

from recd_plugins.interfaces.model_tables import (
    EmbeddingModule,
    embedding_modules,
    outermost_sharded,
)

DENSE = "the dense optimizer"
_MAX_NAMES = 3
_TITLES = ("tables", "rows", "dim", "sharding", "kernel", "optimizer", "sharded by")


@dataclass(frozen=True)
class TableLine:
    """Report line for one table of a sharded model.

    ``sharding`` and ``kernel`` are TorchRec's names, or "" if the table is not sharded.
    ``sharded_by`` is the type and path of the sharded module, or the reason why the table is not
    sharded.
    """

    name: str
    rows: int
    dim: int
    sharding: str
    kernel: str
    optimizer: str
    sharded_by: str


@dataclass(frozen=True)
class ShardedTables:
    """Report lines of all tables; ``str()`` merges tables that differ only in name and rows."""

    lines: tuple[TableLine, ...]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [_TITLES]
        groups: dict[tuple[Any, ...], list[TableLine]] = {}
        for line in self.lines:
            groups.setdefault(astuple(line)[2:], []).append(line)
        for shared, alike in groups.items():
            names = ", ".join(line.name for line in alike)
            if len(alike) > _MAX_NAMES:
                names = f"{alike[0].name} ... {alike[-1].name} ({len(alike)} tables)"
            total = f"{sum(line.rows for line in alike):,}"
            rows.append((names, total, *(str(value) or "-" for value in shared)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(
                cell.rjust(width) if title in ("rows", "dim") else cell.ljust(width)
                for title, cell, width in zip(_TITLES, row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join(table)


def describe_tables(dmp: nn.Module) -> ShardedTables:
    """Return a report line per table of a DistributedModelParallel. Not collective."""
    model = get_unwrapped_module(dmp)
    lines = [line for path, module in outermost_sharded(model) for line in _lines(path, module)]
    lines += [line for left in embedding_modules(model) for line in left_alone(left)]
    return ShardedTables(tuple(lines))


def _lines(path: str, outermost: nn.Module) -> Iterator[TableLine]:
    by = f"{type(outermost).__name__} {path}".rstrip()
    for module in outermost.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            shardings = module._embedding_shardings
        elif isinstance(module, ShardedEmbeddingCollection):
            shardings = list(module._sharding_type_to_sharding.values())
        else:
            continue
        ranks = (rank for each in shardings for rank in each._grouped_embedding_configs_per_rank)
        groups = [group for rank in ranks for group in rank]
        found = {table.name: (group, table) for group in groups for table in group.embedding_tables}
        for name, planned in module.module_sharding_plan.items():
            if name not in found:
                continue
            group, table = found[name]
            dense = group.compute_kernel == EmbeddingComputeKernel.DENSE
            yield TableLine(
                name,
                table.num_embeddings,
                table.embedding_dim,
                planned.sharding_type,
                planned.compute_kernel,
                DENSE if dense else describe_optimizer(group.fused_params or {}),
                by,
            )


def describe_optimizer(params: Mapping[str, Any]) -> str:
    """Return FBGEMM's optimizer name and learning rate as text, with defaults filled in."""
    defaults = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    optimizer, rate = (
        params.get(name, defaults[name].default) for name in ("optimizer", "learning_rate")
    )
    name = optimizer.value if isinstance(optimizer, EmbOptimType) else str(optimizer)
    return f"{name}, lr {float(rate):g}" + ("" if "optimizer" in params else " (FBGEMM's default)")


def left_alone(left: EmbeddingModule) -> Iterator[TableLine]:
    """Yield a report line for each table of an unsharded module that says why it is unsharded."""
    why = f"{left.path or 'the model'} is not in the plan" if left.ours else left.why_left
    brought = {
        optimizer.__name__
        for parameter in left.shardable.parameters()
        for optimizer in getattr(parameter, "_optimizer_classes", [])
    }
    for table in left.tables:
        yield TableLine(
            table.name,
            table.num_embeddings,
            table.embedding_dim,
            "",
            "",
            f"{' or '.join(sorted(brought))} in backward" if brought else DENSE,
            f"nobody: {why}",
        )
