"""TorchRec's sharding types, its planner and FBGEMM's UVM cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from recd_plugins.api import Cache, PlanContext, PluginOptions, SetupError, Sharding, Table

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.planner.types import ParameterConstraints


class CoalesceOptions(PluginOptions):
    coalesce: bool = Field(
        default=False, description="Send each distinct id only once per batch and rank."
    )


class TypedSharding(Sharding):
    """Base of sharding plugins that use one of TorchRec's sharding types for their tables."""

    sharding_type: ClassVar[str]

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return a dict from table name to constraints that allow only the sharding type."""
        from torchrec.distributed.planner.types import ParameterConstraints

        return {
            table.name: ParameterConstraints(sharding_types=[self.sharding_type])
            for table in tables
        }


class CoalescingSharding(TypedSharding):
    """Base of sharding plugins with the option ``coalesce``.

    Coalescing sends each distinct id only once per batch and rank.
    """

    class Options(CoalesceOptions):
        pass

    options: CoalesceOptions

    @property
    def coalesces(self) -> bool:
        return self.options.coalesce


def _saves(tables: Sequence[Table], context: PlanContext) -> bool:
    """Return whether coalescing may reduce the bytes sent for at least one table.

    Without coalescing, a pooled table sends ids or pooled sums, whichever are fewer.
    """
    profile, batch_size = context.data.profile(), context.batch_size
    uncoalesced = replace(profile, distinct={})

    def sent(table: Table) -> float:
        ids = uncoalesced.ids(table, batch_size)
        sums = context.world_size * uncoalesced.rows(table, batch_size)
        return min(ids, sums) if table.pooled else ids

    known = [table for table in tables if table.name in profile.distinct]
    return any(profile.ids(table, batch_size) < sent(table) for table in known)


class TableWise(CoalescingSharding):
    """Table-wise: places each table on one rank, which TorchRec's planner chooses."""

    name = "torchrec.table_wise"
    sharding_type = "table_wise"

    @classmethod
    def offers(cls, tables: Sequence[Table], context: PlanContext) -> Sequence[Mapping[str, Any]]:
        """Return option values that the plan search should try for sequence tables on CPU.

        By default the planner splits these tables by row. Table-wise sharding needs fewer kernel
        calls, because only one rank looks up a table.
        """
        costs = context.costs
        if context.world_size == 1 or costs is None or not costs.lookup.lookups:
            return []
        sequences = [table for table in tables if not table.pooled]
        if context.device_type != "cpu" or not sequences:
            return []
        return [{}, {"coalesce": True}] if _saves(sequences, context) else [{}]


class RowWise(CoalescingSharding):
    """Row-wise: splits the rows of each table evenly over all ranks."""

    name = "torchrec.row_wise"
    sharding_type = "row_wise"


class ColumnWise(CoalescingSharding):
    """Column-wise: splits the columns of each table into equal parts on different ranks."""

    name = "torchrec.column_wise"
    sharding_type = "column_wise"

    class Options(CoalesceOptions):
        shards: int = Field(
            default=2, ge=2, description="Number of parts that each table is split into."
        )

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return a dict from table name to constraints: column-wise, with the width of a part.

        Raises SetupError if ``embedding_dim`` of a table is not a multiple of ``4 * shards``.
        """
        shards = cast(ColumnWise.Options, self.options).shards
        for table in tables:
            # FBGEMM's kernels need rows of a multiple of four scalars.
            if table.embedding_dim % (4 * shards):
                raise SetupError(
                    f"{self.name}: table {table.name!r} has embedding_dim {table.embedding_dim}, "
                    f"which is not a multiple of {4 * shards} (4 * shards). Change the model's "
                    "embedding_dim or the option 'shards'."
                )
        found = super().constraints(tables)
        for table in tables:
            found[table.name].min_partition = table.embedding_dim // shards
        return found


class DataParallel(TypedSharding):
    """Data-parallel: keeps a copy of each table on every rank. Suits small tables."""

    name = "torchrec.data_parallel"
    sharding_type = "data_parallel"
    replicates = True


class Planner(CoalescingSharding):
    """Lets TorchRec's planner choose the sharding type of each table."""

    name = "torchrec.planner"

    class Options(CoalesceOptions):
        replicate: bool = Field(
            default=False,
            description=(
                "Let the planner copy small tables to every rank. On CPU, applies to sequence "
                "tables and to tables that look up deduplicated batches."
            ),
        )

        @model_validator(mode="after")
        def _not_both(self) -> Self:
            if self.coalesce and self.replicate:
                raise ValueError(
                    "options 'coalesce' and 'replicate' cannot both be true, because no ids are "
                    "sent for replicated tables. Set one of them to false."
                )
            return self

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:  # noqa: ARG002
        """Return an empty dict, so that the planner may choose any sharding type."""
        return {}

    @property
    def may_replicate(self) -> bool:
        return cast(Planner.Options, self.options).replicate

    @classmethod
    def offers(cls, tables: Sequence[Table], context: PlanContext) -> Sequence[Mapping[str, Any]]:
        """Return option values that the plan search should try: ``coalesce`` or ``replicate``."""
        offered = [{"coalesce": True}] if _saves(tables, context) else []
        return [*offered, {"replicate": True}] if _some_are_small(tables, context) else offered


def _some_are_small(tables: Sequence[Table], context: PlanContext) -> bool:
    """Return whether copies of a table on every rank may be faster than sharding it.

    True if a table has fewer rows than the embeddings that a rank would send. Also true if
    all-reducing all tables' gradients is faster than the latency of the saved all-to-alls.
    """
    if context.device_type != "cpu" or context.world_size == 1:
        return False
    profile, batch_size = replace(context.data.profile(), distinct={}), context.batch_size

    def sent(table: Table) -> float:
        return (profile.rows if table.pooled else profile.ids)(table, batch_size)

    if any(table.num_embeddings < sent(table) for table in tables):
        return True
    if context.costs is None:
        return False
    from recd_plugins.api import step_costs

    reduced = sum(4 * table.embedding_dim * table.num_embeddings for table in tables)
    latency = step_costs.COLLECTIVES * context.costs.all_to_all.collectives
    return reduced * context.costs.all_reduce.bytes_reduced < latency


class Uvm(Cache):
    """FBGEMM UVM caching: tables in host memory, with a cache of their rows in GPU memory."""

    name = "torchrec.uvm"

    class Options(PluginOptions):
        load_factor: float = Field(
            default=0.2,
            gt=0,
            le=1,
            description="Fraction of each table's rows cached in GPU memory.",
        )
        algorithm: Literal["lru", "lfu"] = Field(
            default="lru",
            description=(
                "Rows to keep in GPU memory: the most recently used (lru) or the most "
                "frequently used (lfu)."
            ),
        )

    def check(self, device: torch.device) -> None:
        """Raise SetupError if the device is not CUDA."""
        if device.type != "cuda":
            raise SetupError(
                f"{self.name!r} needs CUDA, but this run uses the device {device.type!r}. Set "
                "enabled: false on its cache: entry, or train on a machine with a GPU (pip "
                'install "recd-plugins[cuda]").'
            )

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return a dict from table name to constraints: UVM caching kernel and cache size."""
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.distributed.types import CacheParams

        options = cast(Uvm.Options, self.options)
        return {
            table.name: ParameterConstraints(
                compute_kernels=["fused_uvm_caching"],
                cache_params=CacheParams(
                    algorithm=CacheAlgorithm[options.algorithm.upper()],
                    load_factor=options.load_factor,
                ),
            )
            for table in tables
        }
