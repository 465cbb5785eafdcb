"""``torchrec.column_wise``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from pydantic import Field

from recd_plugin_torchrec.coalescing import CoalesceOptions, CoalescingSharding
from recd_plugins.api import SetupError, Table

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import ParameterConstraints


class ColumnWise(CoalescingSharding):
    """The columns of each table split into equal parts, which the planner places."""

    name = "torchrec.column_wise"

    class Options(CoalesceOptions):
        """How many parts, and what is sent."""

        shards: int = Field(default=2, ge=2, description="Parts of a table.")

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """One sharding type and the width of a part for each of ``tables``.

        Raises:
            SetupError: a table's columns do not split into that many parts of 4, 8, 12, ...
        """
        from torchrec.distributed.planner.types import ParameterConstraints

        shards = cast(ColumnWise.Options, self.options).shards
        for table in tables:
            # FBGEMM's kernels take rows of whole groups of four scalars.
            if table.embedding_dim % (4 * shards):
                raise SetupError(
                    f"{self.name}: table {table.name} has {table.embedding_dim} columns, which "
                    f"do not split into {shards} parts of a multiple of 4; change the model's "
                    "embedding_dim or the option shards"
                )
        return {
            table.name: ParameterConstraints(
                sharding_types=["column_wise"], min_partition=table.embedding_dim // shards
            )
            for table in tables
        }
