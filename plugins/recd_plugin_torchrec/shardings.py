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
        default=False, description="Send each distinct id once per batch and rank."
    )


class TypedSharding(Sharding):
    """A plugin for one TorchRec sharding type."""

    sharding_type: ClassVar[str]

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return constraints with one sharding type for each of ``tables``."""
        from torchrec.distributed.planner.types import ParameterConstraints

        return {
            table.name: ParameterConstraints(sharding_types=[self.sharding_type])
            for table in tables
        }


class CoalescingSharding(TypedSharding):
    """A sharding type that can coalesce ids."""

    class Options(CoalesceOptions):
        pass

    options: CoalesceOptions

    @property
    def coalesces(self) -> bool:
        return self.options.coalesce


def _saves(tables: Sequence[Table], context: PlanContext) -> bool:
    """Return whether coalescing may send less. Only for pooled tables with fewer rows than sums."""
    profile, batch_size = context.data.profile(), context.batch_size
    uncoalesced = replace(profile, distinct={})

    def sent(table: Table) -> float:
        ids = uncoalesced.ids(table, batch_size)
        sums = context.world_size * uncoalesced.rows(table, batch_size)
        return min(ids, sums) if table.pooled else ids

    known = [table for table in tables if table.name in profile.distinct]
    return any(profile.ids(table, batch_size) < sent(table) for table in known)


class TableWise(CoalescingSharding):
    """Table-wise: each table is on one rank, which the planner chooses."""

    name = "torchrec.table_wise"
    sharding_type = "table_wise"

    @classmethod
    def offers(cls, tables: Sequence[Table], context: PlanContext) -> Sequence[Mapping[str, Any]]:
        """Offer sequences on CPUs, whose rows the planner splits.

        Ranks without a table call no kernel. The bytes sent leave tables to one rank; where
        processors take the time, they count less.
        """
        costs = context.costs
        if context.world_size == 1 or costs is None or not costs.lookup.lookups:
            return []
        sequences = [table for table in tables if not table.pooled]
        if context.device_type != "cpu" or not sequences:
            return []
        return [{}, {"coalesce": True}] if _saves(sequences, context) else [{}]


class RowWise(CoalescingSharding):
    """Row-wise: the rows of each table are split evenly over all ranks."""

    name = "torchrec.row_wise"
    sharding_type = "row_wise"


class ColumnWise(CoalescingSharding):
    """Column-wise: tables are split into equal parts by columns; the planner places the parts."""

    name = "torchrec.column_wise"
    sharding_type = "column_wise"

    class Options(CoalesceOptions):
        shards: int = Field(default=2, ge=2, description="Parts per table.")

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return constraints with the sharding type and part width for each of ``tables``.

        Raises:
            SetupError: a table's columns do not split into that many parts of 4, 8, 12, ...
        """
        shards = cast(ColumnWise.Options, self.options).shards
        for table in tables:
            # FBGEMM's kernels need rows of a multiple of four scalars.
            if table.embedding_dim % (4 * shards):
                raise SetupError(
                    f"{self.name}: table {table.name} has {table.embedding_dim} columns, which "
                    f"do not split into {shards} parts of a multiple of 4; change the model's "
                    "embedding_dim or the option shards"
                )
        found = super().constraints(tables)
        for table in tables:
            found[table.name].min_partition = table.embedding_dim // shards
        return found


class DataParallel(TypedSharding):
    """Data-parallel: every rank has a copy of each table. For small tables."""

    name = "torchrec.data_parallel"
    sharding_type = "data_parallel"
    replicates = True


class Planner(CoalescingSharding):
    """Lets TorchRec's planner decide, as for tables without a sharding entry."""

    name = "torchrec.planner"

    class Options(CoalesceOptions):
        replicate: bool = Field(
            default=False,
            description=(
                "Allow small tables on every rank: sequence tables, and tables of "
                "deduplicated batches on CPU."
            ),
        )

        @model_validator(mode="after")
        def _not_both(self) -> Self:
            if self.coalesce and self.replicate:
                raise ValueError(
                    "coalesce and replicate: ids of replicated tables are not sent; leave one out"
                )
            return self

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:  # noqa: ARG002
        """Return no constraints: the planner is free."""
        return {}

    @property
    def may_replicate(self) -> bool:
        return cast(Planner.Options, self.options).replicate

    @classmethod
    def offers(cls, tables: Sequence[Table], context: PlanContext) -> Sequence[Mapping[str, Any]]:
        """Offer coalesced tables or tables on every rank, if that may send less."""
        offered = [{"coalesce": True}] if _saves(tables, context) else []
        return [*offered, {"replicate": True}] if _some_are_small(tables, context) else offered


def _some_are_small(tables: Sequence[Table], context: PlanContext) -> bool:
    """Whether summing gradients may take less time than sending embeddings.

    That of one table, or of all tables within the latency of the collectives that this spares.
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
    """FBGEMM's UVM caching: tables are in host memory, hot rows in GPU memory."""

    name = "torchrec.uvm"

    class Options(PluginOptions):
        load_factor: float = Field(
            default=0.2, gt=0, le=1, description="Rows in GPU memory as a share of the table."
        )
        algorithm: Literal["lru", "lfu"] = Field(
            default="lru",
            description="Which rows stay in GPU memory: the last used or the most used.",
        )

    def check(self, device: torch.device) -> None:
        """Raise an error unless the device is CUDA.

        Raises:
            SetupError: the device is not CUDA.
        """
        if device.type != "cuda":
            raise SetupError(
                f"{self.name} needs CUDA, as it caches host memory in GPU memory, and this run is "
                f"on {device.type}: set enabled: false on its cache entry, or train on a machine "
                'with a GPU (pip install "recd-plugins[cuda]")'
            )

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return constraints with the caching kernel and its parameters for each of ``tables``."""
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
