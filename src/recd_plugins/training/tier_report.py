"""What tiers of rows send, next to what their plan predicts (FlexShard, arXiv 2301.02959)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from recd_plugins.planning.tiers import TIERS, Tier, TierPlan, traffic
from recd_plugins.training.figure_text import bytes_text

_GROUPS = {"global": "all ranks", "node": "each node", "cross": "across nodes"}
_COLLECTIVES = {"all_to_all": "all-to-all", "all_reduce": "all-reduce"}


@dataclass(frozen=True)
class TierBytes:
    """Bytes that all ranks together send in one step for one tier.

    Attributes:
        tier: ``cold``, ``hot``, ``flex``, or ``flex_gradients`` for what the flex tier's gradients
            are reduced by.
        collective: ``all_to_all`` or ``all_reduce``.
        group: the ranks of a collective: ``global``, ``node``, or ``cross`` for one of each node.
        observed: by the byte counter; None for a run too short to tell.
        predicted: by the plan.
    """

    tier: Tier
    collective: str
    group: str
    observed: float | None
    predicted: float

    @property
    def ratio(self) -> float | None:
        """Observed over predicted."""
        if self.observed is None or not self.predicted:
            return None
        return self.observed / self.predicted


@dataclass(frozen=True)
class OtherTables:
    """Tables without tiers in one EmbeddingCollection with tables that have some.

    Their ids travel in the same all-to-all, which the counter cannot take apart.

    Attributes:
        names: of the tables.
        predicted: bytes that all ranks send for them in one step.
        plain: the same for batches that are not deduplicated.
    """

    names: tuple[str, ...] = ()
    predicted: float = 0.0
    plain: float = 0.0


@dataclass(frozen=True)
class TierReport:
    """The traffic of all tiers of a run; that of the cold tier with the other tables'.

    Attributes:
        tiers: in the order of ``TIERS``.
        row_wise: bytes that all ranks would send in the all-to-all of these tables with all of
            their rows row-wise, by the same prediction, for batches as deduplicated as this run's.
        plain_row_wise: the same for batches that are not deduplicated.
        others: the other tables.
    """

    tiers: tuple[TierBytes, ...]
    row_wise: float
    plain_row_wise: float
    others: OtherTables

    @classmethod
    def of(
        cls,
        plans: Sequence[TierPlan],
        observed: Mapping[str, float] | None,
        others: OtherTables | None = None,
    ) -> TierReport:
        """The report of a run.

        Args:
            plans: of the sharding entries that have tiers, for the ranks of the run; at least one.
            observed: bytes of all ranks in one step by tier; None where nothing was counted.
            others: the other tables; none without it.
        """
        others = others or OtherTables()
        tiers = []
        for tier in TIERS:
            parts = [traffic(plan)[tier] for plan in plans]
            predicted = sum(
                plan.cluster.world_size * part.bytes
                for plan, part in zip(plans, parts, strict=True)
            )
            tiers.append(
                TierBytes(
                    tier,
                    parts[0].collective,
                    parts[0].group,
                    None if observed is None else observed.get(tier, 0.0),
                    predicted + (others.predicted if tier == "cold" else 0.0),
                )
            )
        return cls(
            tuple(tiers),
            others.predicted + sum(_row_wise(plan) for plan in plans),
            others.plain + sum(_row_wise(_plain(plan)) for plan in plans),
            others,
        )

    @property
    def a2a_reduction(self) -> tuple[float | None, float]:
        """The share of ``plain_row_wise`` that is not sent: observed, and predicted."""
        cold = self.tiers[TIERS.index("cold")]
        if not self.plain_row_wise:
            return None, 0.0
        observed = None if cold.observed is None else 1 - cold.observed / self.plain_row_wise
        return observed, 1 - cold.predicted / self.plain_row_wise

    def as_json(self) -> dict[str, Any]:
        """JSON values; bytes are those of all ranks in one step."""
        observed, predicted = self.a2a_reduction
        return {
            "tiers": {
                tier.tier: {
                    **{name: value for name, value in asdict(tier).items() if name != "tier"},
                    "ratio": tier.ratio,
                }
                for tier in self.tiers
            },
            "row_wise": self.row_wise,
            "plain_row_wise": self.plain_row_wise,
            "a2a_reduction": {"observed": observed, "predicted": predicted},
            "other_tables": list(self.others.names),
        }

    def table(self, name: str = "") -> Table:
        """A row for each tier, then what row-wise sharding would send; ``name`` tells the run."""
        title = "tiers of rows: bytes sent a step, all ranks"
        table = Table(title=f"{name}, {title}" if name else title)
        for heading in ("", "collective", "over"):
            table.add_column(heading)
        for heading in ("observed", "predicted", "ratio"):
            table.add_column(heading, justify="right")
        for tier in self.tiers:
            table.add_row(
                tier.tier.replace("_", " "),
                _COLLECTIVES[tier.collective],
                _GROUPS[tier.group],
                bytes_text(tier.observed),
                bytes_text(tier.predicted),
                "" if tier.ratio is None else f"{tier.ratio:.3f}",
            )
        table.add_section()
        instead = {"all row-wise": self.row_wise}
        if self.plain_row_wise != self.row_wise:
            instead["  not deduplicated"] = self.plain_row_wise
        for words, num_bytes in instead.items():
            table.add_row(words, "all-to-all", "all ranks", "", bytes_text(num_bytes), "")
        observed, predicted = self.a2a_reduction
        measured = "" if observed is None else f"{observed:.1%}, "
        table.caption = (
            f"saved of the all-to-all over all ranks: {measured}predicted {predicted:.1%}"
        )
        if self.others.names:
            table.caption += f"\nwith tables without tiers: {', '.join(self.others.names)}"
        return table


def _row_wise(plan: TierPlan) -> float:
    """Bytes of all ranks with every row in the cold tier."""
    tables = tuple(
        replace(table, hot=0, flex=0, hot_share=0.0, flex_share=0.0) for table in plan.tables
    )
    return plan.cluster.world_size * traffic(replace(plan, tables=tables))["cold"].bytes


def _plain(plan: TierPlan) -> TierPlan:
    """The same for batches that are not deduplicated."""
    tables = tuple(
        replace(table, demand=replace(table.demand, dedupe_factor=1.0)) for table in plan.tables
    )
    return replace(plan, tables=tables)
