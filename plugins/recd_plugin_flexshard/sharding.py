"""``flexshard.two_tier``, ``flexshard.three_tier`` and ``flexshard.joint``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator

from recd_plugins.api import (
    AccessOptions,
    PlanContext,
    SetupError,
    SharderArguments,
    Sharding,
    Table,
    text_utils,
)

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder

    from recd_plugin_flexshard.part import TieredPart
    from recd_plugin_flexshard.planning import TierPlan


Count = Annotated[StrictInt, Field(gt=0)]
_MULTIPLE = re.compile(r"(\d+(?:\.\d+)?)\s*[xX]")


def read_budget(budget: Any) -> dict[str, float]:
    """Return a budget as ``memory_ratio`` or ``memory_bytes`` of ``CostOptions``."""
    if budget == "memory_neutral":
        return {"memory_ratio": 1.0}
    if isinstance(budget, str) and (multiple := _MULTIPLE.fullmatch(budget.strip())):
        if ratio := float(multiple[1]):
            return {"memory_ratio": ratio}
    elif isinstance(budget, str | int):
        try:
            return {"memory_bytes": float(text_utils.read_bytes(budget))}
        except ValueError:
            pass
    raise ValueError(
        f"{budget!r} is no budget; write memory_neutral, a multiple of row-wise memory as 1.5x, or "
        "bytes as 2GiB"
    )


class OtherCluster(BaseModel):
    """A cluster to plan tiers for, in place of the one that trains."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    topology: str = Field(
        default="machine",
        description="Name or file of a topology, as recd plan --topology takes it.",
    )
    nodes: Count | None = Field(default=None, description="Nodes; null takes the topology's.")
    ranks_per_node: Count | None = Field(
        default=None, description="Ranks of a node; null takes the topology's."
    )
    batch_size: Count | None = Field(
        default=None, description="Rows of a rank; null takes training.batch_size."
    )


class TierOptions(AccessOptions):
    """Options of all three plugins."""

    budget: str | Annotated[StrictInt, Field(gt=0)] = Field(
        default="memory_neutral",
        description="Memory of a rank for these tables: memory_neutral (what plain row-wise "
        "takes), a multiple of that as 1.5x, or bytes as 2GiB.",
    )
    memory_multiplier: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(
        default=None,
        description="M: memory that a copied row takes, over that of its weights; null takes what "
        "the topology has measured, else 6.",
    )
    saved_activations: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = Field(
        default=None,
        description="c: embeddings that need not be held for a read of a row that is on every "
        "rank; null takes what the topology has measured, else 1.",
    )
    dedupe: Literal["data", "none"] | Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default="data",
        description="Dedupe factors to plan with: those of the data, none, or one number.",
    )
    minimise: Literal["time", "bytes"] = Field(
        default="time",
        description="Seconds of all collectives: no row goes where it takes more time than it "
        "saves; or bytes of the all-to-all between all ranks.",
    )
    sync: Literal["auto", "dense", "sparse"] = Field(
        default="auto",
        description="How gradients of copies are summed: of all rows (dense), of those that a step "
        "touches (sparse), or of each tier as costs less.",
    )
    coalesce: bool = Field(
        default=False,
        description="Send each id of a table once a batch and rank, and plan with that.",
    )
    overlap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default=0.0,
        description="The share of the other collectives' time that other work hides.",
    )
    retier_every: Count | None = Field(
        default=None,
        description="Choose the rows of the tiers anew after so many steps, from the reads in "
        "them; null keeps them.",
    )
    plan_for: OtherCluster | None = Field(
        default=None,
        description="Choose the tiers for this cluster, whatever trains; null: for what trains.",
    )

    @field_validator("budget", mode="before")
    @classmethod
    def _budget_is_known(cls, value: Any) -> Any:
        read_budget(value)
        return value

    def cost_options(self) -> dict[str, Any]:
        """Return fields of ``CostOptions``."""
        return {
            **read_budget(self.budget),
            "minimise": self.minimise,
            "overlap": self.overlap,
            "coalesce": self.coalesce,
            "sync": self.sync,
        }


class TieredSharding(Sharding):
    """Cold rows are the user's row-wise table; copies of hot and flex rows are laid over it."""

    strategy: ClassVar[Literal["two_tier", "three_tier", "joint"]]

    class Options(TierOptions):
        """Options of all three plugins."""

    options: TierOptions
    _planned: tuple[tuple[Sequence[Table], PlanContext], TierPlan] | None = None

    @property
    def coalesces(self) -> bool:
        return self.options.coalesce

    def rewrite(self, model: nn.Module, tables: Sequence[Table], setting: PlanContext) -> nn.Module:
        from recd_plugin_flexshard.runtime.collection import RowTiers, with_tiers

        plan = self._plan(tables, setting)
        if plan is None:
            return model
        rows = {table.name: RowTiers(table.hot_rows, table.flex_rows) for table in plan.tables}
        return with_tiers(model, rows, self.options.retier_every, plan.syncs.sparse)

    def part(self, tables: Sequence[Table], setting: PlanContext) -> TieredPart | None:
        from recd_plugin_flexshard.part import TieredPart

        plan = self._plan(tables, setting)
        return None if plan is None else TieredPart(plan)

    def _plan(self, tables: Sequence[Table], setting: PlanContext) -> TierPlan | None:
        """Plan once for a setting."""
        if not tables:
            return None
        if pooled := [table for table in tables if table.pooled]:
            names = text_utils.shortened([table.name for table in pooled])
            features = text_utils.shortened(
                [feature for table in pooled for feature in table.features]
            )
            raise SetupError(
                f"{self.name} is for tables of sequences, but bags look up {names}: name "
                f"{features} in a pooling: entry if these are sequences, or use torchrec.row_wise"
            )
        key = (tuple(tables), setting)
        if self._planned is None or self._planned[0] != key:
            from recd_plugin_flexshard.table_plan import plan_tables

            self._planned = key, plan_tables(self.strategy, self.options, tables, setting)
        return self._planned[1]

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        from torchrec.distributed.planner.types import ParameterConstraints

        return {
            table.name: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
            for table in tables
        }

    def sharders(self, arguments: SharderArguments) -> Sequence[ModuleSharder[nn.Module]]:
        from recd_plugin_flexshard.runtime import TieredEmbeddingCollectionSharder

        return [
            TieredEmbeddingCollectionSharder(
                arguments.fused_params,
                arguments.qcomm_codecs_registry,
                kernels=arguments.kernels,
                coalesced=arguments.coalesced,
            )
        ]


class TwoTier(TieredSharding):
    """Replicate frequently read rows of sequence tables, shard the rest row-wise (FlexShard)."""

    name = "flexshard.two_tier"
    strategy: ClassVar[Literal["two_tier"]] = "two_tier"


class ThreeTier(TieredSharding):
    """Rows of sequence tables on every rank, once in every node, or row-wise (FlexShard)."""

    name = "flexshard.three_tier"
    strategy: ClassVar[Literal["three_tier"]] = "three_tier"

    class Options(TierOptions):
        """Options of ``flexshard.three_tier``."""

        stop: Literal["dp_flex", "dp_rw"] = Field(
            default="dp_flex",
            description="The last row on every rank takes less memory there than in the flex tier "
            "(dp_flex), or than row-wise (dp_rw).",
        )

        def cost_options(self) -> dict[str, Any]:
            return {**super().cost_options(), "stop": self.stop}


class Joint(TieredSharding):
    """Two or three tiers of rows, whichever is best for the topology and deduplicated data."""

    name = "flexshard.joint"
    strategy: ClassVar[Literal["joint"]] = "joint"

    @classmethod
    def offers(cls, tables: Sequence[Table], setting: PlanContext) -> Sequence[Mapping[str, Any]]:
        if setting.world_size == 1 or any(table.pooled for table in tables):
            return []
        offers: list[dict[str, Any]] = [{}, {"coalesce": True}]
        if setting.nodes > 1:
            # A coalesced table may take more than a plain one before a row is copied.
            offers += [{**each, "budget": "2x"} for each in offers]
        return offers
