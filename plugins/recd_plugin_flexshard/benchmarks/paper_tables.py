"""The paper's tables 5 and 6 next to ours, and the joint plan beyond them (NumPy alone)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from recd_plugin_flexshard.planning import (
    PAPER,
    Strategy,
    TierPlan,
    paper,
    plan_tiers,
)
from recd_plugins.testing.benchmark import Detail, Figure

_MINIMISE: tuple[Literal["time", "bytes"], ...] = ("time", "bytes")
_STRATEGIES: Mapping[Strategy, str] = {
    "row_wise": "row-wise",
    "two_tier": "2-tier",
    "three_tier": "3-tier",
}
_COLLECTIVES = ("a2a_global", "a2a_intra", "ar_global", "ar_cross")


@dataclass(frozen=True)
class JointFigures:
    """What a joint plan reckons with, in words and in numbers."""

    words: str
    dedupe_factor: float
    memory_multiplier: float
    coalesce: bool = False

    def plan(self, model: str, minimise: Literal["time", "bytes"]) -> TierPlan:
        """The plan for one of the paper's models, at the memory of plain row-wise sharding."""
        options = replace(
            paper.OPTIONS,
            memory_multiplier=self.memory_multiplier,
            coalesce=self.coalesce,
            minimise=minimise,
        )
        table = paper.MODELS[model].fitted(self.dedupe_factor)
        return plan_tiers([table], paper.CLUSTER, "joint", options)


_JOINT = (
    JointFigures("tiers, M=6", 1, 6),
    JointFigures("dedup 4x + tiers, M=6", 4, 6),
    JointFigures("dedup 6.5x + tiers, M=2", 6.5, 2),
    JointFigures("coalescing over 16.5 rows of a session, M=2", 16.5, 2, coalesce=True),
)


def figures() -> list[Figure]:
    """How far the paper's own rows are from using as much memory as row-wise."""
    off = neutrality()
    return [
        Figure.of(
            "table_5_neutrality",
            [max(share for (model, _), share in off.items() if model != "RM-2")],
            unit="share",
            better="lower",
            goal=0.0025,
        ),
        Figure.of(
            "table_5_neutrality_rm2",
            [max(share for (model, _), share in off.items() if model == "RM-2")],
            unit="share",
            better="lower",
            goal=0.01,
        ),
    ]


def details() -> list[Detail]:
    """Tables 5 and 6, and that of joint plans."""
    return [_table_5(), _table_6(), _joint_table()]


def notes() -> list[str]:
    """What the tables leave to the reader."""
    return [
        "tables: ours are of distributions fitted to the coverages of the paper's table 5, which "
        "has no others; the plans and all that follows from them are computed",
        "tables: without overlap, three tiers take longer than two for RM-2 in the paper too: its "
        "latency counts the global all-to-all alone",
    ]


def neutrality() -> dict[tuple[str, str], float]:
    """Memory of the paper's rows over what their coverage frees, off 1, by model and plan.

    Data-parallel rows take ``M - 1/U`` rows of memory each and flex rows ``M/W - 1/U``, together as
    much as the activations of the data-parallel accesses (section 4.3).
    """
    cluster, multiplier = paper.CLUSTER, paper.OPTIONS.memory_multiplier
    hot_row = multiplier - 1 / cluster.world_size
    flex_row = multiplier / cluster.ranks_per_node - 1 / cluster.world_size
    off = {}
    for model in paper.MODELS.values():
        accesses = cluster.batch_size * model.length
        two = model.two_tier_rows * hot_row / (accesses * model.two_tier_covered)
        three = model.hot_rows * hot_row + model.flex_rows * flex_row
        off[model.name, "2-tier"] = abs(two - 1)
        off[model.name, "3-tier"] = abs(three / (accesses * model.hot_covered) - 1)
    return off


@cache
def _plan(model: str, strategy: Strategy) -> TierPlan:
    return plan_tiers([paper.MODELS[model].fitted()], paper.CLUSTER, strategy, paper.OPTIONS)


def _table_5() -> Detail:
    rows: list[list[str | float]] = []
    for model in paper.MODELS.values():
        (two,), (three,) = (_plan(model.name, s).tables for s in ("two_tier", "three_tier"))
        rows.append(
            [
                f"{model.name}, {model.num_embeddings // 10**6}M: paper",
                *_tiers(model.two_tier_rows, model.two_tier_covered),
                *_tiers(model.hot_rows, model.hot_covered),
                *_tiers(model.flex_rows, model.flex_covered),
                f"{model.two_tier_reduction:.1%}",
                f"{model.three_tier_reduction:.1%}",
            ]
        )
        rows.append(
            [
                f"{model.name}: ours",
                *_tiers(two.hot, two.hot_share),
                *_tiers(three.hot, three.hot_share),
                *_tiers(three.flex, three.flex_share),
                f"{_plan(model.name, 'two_tier').a2a_reduction:.1%}",
                f"{_plan(model.name, 'three_tier').a2a_reduction:.1%}",
            ]
        )
    return Detail(
        "table 5, memory-neutral plans",
        ["", "2-tier DP", "cover", "3-tier DP", "cover", "Flex", "cover", "a2a 2-", "a2a 3-"],
        rows,
    )


def _table_6() -> Detail:
    """With latencies, which fit the paper's figures better than bandwidths alone."""
    cluster = replace(paper.CLUSTER, collectives=PAPER)
    rows: list[list[str | float]] = []
    for model in paper.MODELS.values():
        of_paper = {"two_tier": model.two_tier_seconds, "three_tier": model.three_tier_seconds}
        for strategy, words in _STRATEGIES.items():
            plan = plan_tiers([model.fitted()], cluster, strategy, paper.OPTIONS)
            rows.append(
                [
                    f"{model.name}: {words}",
                    *(f"{1e3 * getattr(plan.seconds, name):.1f}" for name in _COLLECTIVES),
                    f"{1e3 * plan.seconds.exposed():.1f}",
                    f"{1e3 * of_paper[strategy]:.0f}" if strategy in of_paper else "",
                ]
            )
    return Detail(
        "table 6, ms of collectives on 4 nodes x 8 A100-40GB",
        ["", "a2a", "a2a node", "all-reduce", "cross", "sum", "paper"],
        rows,
    )


def _joint_table() -> Detail:
    rows: list[list[str | float]] = []
    for joint in _JOINT:
        for minimise in _MINIMISE:
            saved = (joint.plan(model, minimise).a2a_reduction for model in paper.MODELS)
            rows.append([f"{joint.words}; least {minimise}", *(f"{share:.1%}" for share in saved)])
    return Detail(
        "all-to-all saved by joint plans, at the memory of plain row-wise",
        ["", *paper.MODELS],
        rows,
    )


def _tiers(rows: int, share: float) -> tuple[str, str]:
    return f"{rows:,}", f"{share:.1%}"
