from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from recd_plugin_flexshard.options import read_budget
from recd_plugin_flexshard.planning import TierPlan
from recd_plugin_flexshard.sharding import Joint, ThreeTier, TwoTier
from recd_plugin_flexshard.strategy import TieredStrategy
from recd_plugin_flexshard.table_plan import cluster_of
from recd_plugin_flexshard.tests.conftest import ELSEWHERE
from recd_plugins.interfaces import PlanContext, Sharding, Table, TrainingData
from recd_plugins.interfaces.access import AccessProfile
from recd_plugins.interfaces.data_profile import DataProfile, FeatureProfile
from recd_plugins.interfaces.distributions import zipf
from recd_plugins.planning.topologies import load_topology
from recd_plugins.runtime.errors import DataError, SetupError

TABLES = [Table("t_a", ("a",), 200_000, 16, False), Table("t_b", ("b", "c"), 100_000, 16, False)]


class Zipf(TrainingData):
    def profile(self) -> DataProfile:
        repeated = 0.75 * 4096 / 4095  # a dedupe factor of 4 in a batch of 4096
        features = {name: FeatureProfile(50.0, True, *[repeated] * 3) for name in ("a", "b")}
        return DataProfile({**features, "c": FeatureProfile(50.0)})

    def access(self, tables: Any, rows: int | None, *, deduplicated: bool = True) -> AccessProfile:
        return profile_of(tables)


def profile_of(tables: Any) -> AccessProfile:
    profiles = {
        table.name: zipf(table.name, table.num_embeddings, 50.0 * len(table.features), 1.1)
        for table in tables
    }
    return AccessProfile(profiles, "Zipf's law")


@pytest.fixture
def context() -> PlanContext:
    """4 nodes of 8 ranks, as the paper has them."""
    rates = load_topology("zionex-a100-40g", nodes=4, ranks_per_node=8).collective_rates
    sizes: dict[str, Any] = {"world_size": 32, "ranks_per_node": 8, "batch_size": 4096}
    return PlanContext(optimizer="sgd", device_type="cuda", rates=rates, data=Zipf(), **sizes)


def make(plugin: type[Sharding], **options: Any) -> Sharding:
    return plugin(plugin.Options.model_validate(options))


def planned(plugin: type[Sharding], context: PlanContext, **options: Any) -> TierPlan:
    part = make(plugin, **options).strategy(TABLES, context)
    assert isinstance(part, TieredStrategy)
    return part.plan


def hot_and_flex(plan: TierPlan) -> tuple[int, int]:
    return sum(table.hot for table in plan.tables), sum(table.flex for table in plan.tables)


def test_each_plugin_has_its_tiers(context: PlanContext) -> None:
    two, three = planned(TwoTier, context), planned(ThreeTier, context)
    assert hot_and_flex(two)[0] > 0
    assert hot_and_flex(two)[1] == 0
    assert min(hot_and_flex(three)) > 0
    for plan in (two, three):
        assert plan.memory_bytes <= plan.row_wise_memory_bytes * (1 + 1e-9)
        assert plan.cluster == cluster_of(context)
    least = planned(Joint, context, minimise="bytes")
    assert least.a2a_reduction >= max(two.a2a_reduction, three.a2a_reduction)


def test_more_memory_has_more_copies(context: PlanContext) -> None:
    rows = [
        hot_and_flex(planned(Joint, context, budget=budget, minimise="bytes", dedupe="none"))
        for budget in ("0.9x", "memory_neutral", "1.2x")
    ]
    assert rows == sorted(rows, key=sum)
    assert len(set(rows)) == 3
    needed = planned(TwoTier, context).row_wise_memory_bytes
    in_bytes = planned(TwoTier, context, budget=int(needed))
    assert hot_and_flex(in_bytes) == hot_and_flex(planned(TwoTier, context))


def test_budgets() -> None:
    assert read_budget("memory_neutral") == {"memory_ratio": 1.0}
    assert read_budget("1.5x") == {"memory_ratio": 1.5}
    assert read_budget("2 GiB") == {"memory_bytes": 2 * 2**30}
    assert read_budget(4096) == {"memory_bytes": 4096}


def test_dedupe_factors(context: PlanContext) -> None:
    def factors(**options: Any) -> list[float]:
        return [table.demand.dedupe_factor for table in planned(TwoTier, context, **options).tables]

    # Of t_b one of two features is deduplicated, 4 times.
    assert factors() == pytest.approx([4, 2 / (1 / 4 + 1)])
    assert factors(dedupe="none") == [1, 1]
    assert factors(dedupe=3) == [3, 3]


def test_a_plan_for_another_cluster(context: PlanContext) -> None:
    here = replace(context, world_size=4, ranks_per_node=2, batch_size=64)
    other = {**ELSEWHERE, "batch_size": 4096}
    moved = planned(ThreeTier, here, plan_for=other)
    own = planned(ThreeTier, here)
    assert moved.cluster == cluster_of(here)
    assert hot_and_flex(moved) != hot_and_flex(own)
    there = planned(ThreeTier, context, dedupe=2)
    moved = planned(ThreeTier, here, plan_for=other, dedupe=2)
    assert hot_and_flex(moved) == hot_and_flex(there)
    with pytest.raises(SetupError, match=r"or set plan_for\.nodes"):
        planned(ThreeTier, here, plan_for={**other, "nodes": 1})
    for topology in ("nowhere", "no.yaml"):
        with pytest.raises(SetupError, match=f"^option 'plan_for': .*{topology}"):
            planned(ThreeTier, here, plan_for={"topology": topology})


def test_a_flex_tier_needs_nodes(context: PlanContext) -> None:
    one = replace(context, world_size=8)
    with pytest.raises(SetupError, match=r"Use 'flexshard\.two_tier' or 'flexshard\.joint'"):
        planned(ThreeTier, one)
    assert hot_and_flex(planned(Joint, one, minimise="bytes"))[1] == 0


def test_profiles_from_files(context: PlanContext, tmp_path: Path) -> None:
    path = tmp_path / "profile.parquet"
    profile_of(TABLES).save(path)
    found, counted = planned(TwoTier, context, profile=path), planned(TwoTier, context)
    for a, b, table in zip(found.tables, counted.tables, TABLES, strict=True):
        np.testing.assert_array_equal(a.hot_rows, b.hot_rows)
        assert a.demand.features == b.demand.features == len(table.features)
    profile_of(TABLES[:1]).save(path)
    with pytest.raises(DataError, match="does not contain table 't_b"):
        planned(TwoTier, context, profile=path)


def test_counts_of_unique_rows_carry_their_dedupe_factor(
    context: PlanContext, tmp_path: Path
) -> None:
    path = tmp_path / "profile.parquet"
    tables = dict(profile_of(TABLES).tables)
    tables["t_a"] = tables["t_a"].of_unique_rows(4096, 2.5 * tables["t_a"].total)
    AccessProfile(tables, "x").save(path)
    first, second = (each.demand for each in planned(Joint, context, profile=path).tables)
    assert first.dedupe_factor == pytest.approx(2.5)
    assert first.length == pytest.approx(125)
    # t_b counts all rows, so its factor is still that of the data.
    assert second.dedupe_factor == pytest.approx(2 / (1 / 4 + 1))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("budget", value) for value in ("", "0x", "1,5x", "2 bananas", 0, 1.5, True, [1])),
        *(("dedupe", value) for value in (0.5, "all")),
    ],
)
def test_a_wrong_value(option: str, value: object) -> None:
    with pytest.raises(ValidationError, match=option):
        make(TwoTier, **{option: value})
