"""What tiers of rows send, next to what their plan predicts (FlexShard, arXiv 2301.02959)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType
from rich.table import Table

from recd_plugin_flexshard.planning import TIERS, Tier, TierPlan, plan_tiers, traffic
from recd_plugins.api import Section
from recd_plugins.api.files import bytes_text

if TYPE_CHECKING:
    from recd_plugin_flexshard.runtime.retier import RetierReport

_SHOWN_RETIERINGS = 10
_GROUPS = {"global": "all ranks", "node": "each node", "cross": "across nodes"}
_COLLECTIVES = {
    "all_to_all": "all-to-all",
    "all_reduce": "all-reduce",
    "sparse": "of touched rows",
}


@dataclass(frozen=True)
class TierBytes:
    """Bytes that all ranks together send in one step for one tier.

    Attributes:
        tier: ``cold``, ``hot``, ``flex``, or ``flex_gradients`` for what the flex tier's gradients
            are reduced by.
        collective: ``all_to_all``, ``all_reduce``, or ``sparse`` for gradients of touched rows.
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
class TierReport(Section):
    """The traffic of all tiers of a run; that of the cold tier with the other tables'.

    Attributes:
        tiers: in the order of ``TIERS``.
        row_wise: bytes that all ranks would send in the all-to-all of these tables with all of
            their rows row-wise, by the same prediction, for batches as deduplicated as this run's.
        plain_row_wise: the same for batches that are not deduplicated.
        others: the other tables.
        retierings: each new choice of the tiers' rows.
    """

    name: ClassVar[str] = "tiers"

    tiers: tuple[TierBytes, ...]
    row_wise: float
    plain_row_wise: float
    others: OtherTables
    retierings: tuple[RetierReport, ...] = ()

    @classmethod
    def of(
        cls,
        plans: Sequence[TierPlan],
        observed: Mapping[str, float] | None,
        others: OtherTables | None = None,
        retierings: Sequence[RetierReport] = (),
    ) -> TierReport:
        """The report of a run.

        Args:
            plans: of the sharding entries that have tiers, for the ranks of the run; at least one.
            observed: bytes of all ranks in one step by tier; None where nothing was counted.
            others: the other tables; none without it.
            retierings: of all collections.
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
                    # Entries of one collection sum alike: touched rows if one of them does.
                    max((part.collective for part in parts), key="sparse".__eq__),
                    parts[0].group,
                    None if observed is None else observed.get(tier, 0.0),
                    predicted + (others.predicted if tier == "cold" else 0.0),
                )
            )
        return cls(
            tuple(tiers),
            others.predicted + sum(_row_wise(plan, deduplicated=True) for plan in plans),
            others.plain + sum(_row_wise(plan, deduplicated=False) for plan in plans),
            others,
            tuple(retierings),
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
            "retierings": [_retiering_json(report) for report in self.retierings],
        }

    def shown(self, run: str) -> Sequence[RenderableType]:
        """Both of the next."""
        text = self.retiering_text()
        return [self.table(run), *([text] if text else [])]

    def retiering_text(self) -> str:
        """A line for each new choice of rows, the last ones of many."""
        lines = [str(report) for report in self.retierings[-_SHOWN_RETIERINGS:]]
        if (more := len(self.retierings) - len(lines)) > 0:
            lines.insert(0, f"{more} choices of tiers before these; --json has all")
        return "\n".join(lines)

    def table(self, name: str = "") -> Table:
        """A row for each tier that sends, then row-wise sharding; ``name`` tells the run."""
        title = "tiers of rows: bytes sent a step, all ranks"
        table = Table(title=f"{name}, {title}" if name else title)
        for heading in ("", "collective", "over"):
            table.add_column(heading)
        for heading in ("observed", "predicted", "ratio"):
            table.add_column(heading, justify="right")
        for tier in self.tiers:
            if not tier.predicted and not tier.observed:
                continue
            table.add_row(
                tier.tier.replace("_", " "),
                _COLLECTIVES[tier.collective],
                _GROUPS[tier.group],
                bytes_text(tier.observed),
                bytes_text(tier.predicted),
                "" if tier.ratio is None else f"{tier.ratio:.3f}",
            )
        table.add_section()
        instead = {"row-wise": self.row_wise}
        if self.plain_row_wise != self.row_wise:
            instead["row-wise, plain"] = self.plain_row_wise
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


def _retiering_json(report: RetierReport) -> dict[str, Any]:
    moved = {f"{old} to {new}": count for (old, new), count in report.moved.items()}
    return {
        "step": report.step,
        "moved": moved,
        "a2a_share_before": report.a2a_share_before,
        "a2a_share_after": report.a2a_share_after,
    }


def _row_wise(plan: TierPlan, *, deduplicated: bool) -> float:
    """Bytes of all ranks with every row in the cold tier."""
    demands = [table.demand for table in plan.tables]
    options = plan.options
    if not deduplicated:
        demands = [replace(demand, dedupe_factor=1.0) for demand in demands]
        options = options.plain
    cold = traffic(plan_tiers(demands, plan.cluster, "row_wise", options))["cold"]
    return plan.cluster.world_size * cold.bytes
