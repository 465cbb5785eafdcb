"""Simulations against what ranks send, against predictions, and against drawing ids one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recd_plugin_flexshard.planning import (
    ClusterShape,
    CostOptions,
    TableDemand,
    TableTiers,
    TierPlan,
    plan_tiers,
    traffic,
)
from recd_plugin_flexshard.planning.simulate import (
    StepLookups,
    TableRoute,
    simulate,
)
from recd_plugin_flexshard.planning.sources import DrawnBatches
from recd_plugin_flexshard.tests.planning import simulate_cases as cases
from recd_plugins.interfaces.data_profile import DistinctIds
from recd_plugins.testing.gloo import run_on_ranks


def case_plan(cluster: ClusterShape, options: CostOptions) -> TierPlan:
    """The tiers of ``simulate_cases``, as a plan."""
    tables = []
    for name, tiers in cases.TIERS.items():
        rest = np.setdiff1d(np.arange(cases.ROWS[name]), [*tiers.hot, *tiers.flex])
        demand = TableDemand(
            name,
            cases.ROWS[name],
            cases.DIM,
            np.ones(cases.ROWS[name]),
            np.concatenate([tiers.hot, tiers.flex, rest]),
            features=len(cases.FEATURES[name]),
        )
        tables.append(TableTiers(demand, len(tiers.hot), len(tiers.flex), 0, 0, 0, 0, 0))
    plan = plan_tiers([table.demand for table in tables], cluster, "row_wise", options)
    return TierPlan(**{**vars(plan), "tables": tuple(tables)})


class CaseBatches:
    """Those of ``simulate_cases``."""

    name = "cases"

    def __init__(self, length_bytes: int) -> None:
        self._length_bytes = length_bytes

    def read(
        self, routes: list[TableRoute], rank: int, steps: int
    ) -> Iterator[tuple[StepLookups, StepLookups]]:
        for step in range(steps):
            lists = {name: cases.lists(rank, step, name) for name in "abcd"}
            ids = [
                np.concatenate([row for name in features for row in lists[name]])
                for features in cases.FEATURES.values()
            ]

            def lookups(of: list[NDArray[np.int64]], num_lists: int) -> StepLookups:
                counts = [route.counts(each) for route, each in zip(routes, of, strict=True)]
                return StepLookups(counts, num_lists, self._length_bytes)

            plain = lookups(ids, sum(map(len, lists.values())))
            coalesced = routes[0].coalesced
            yield lookups([np.unique(each) for each in ids], 4) if coalesced else plain, plain


@pytest.mark.parametrize("coalesced", [False, True], ids=["", "coalesced"])
@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "lengths"),
    [(4, 2, torch.int32), (4, 4, torch.int64), (4, 1, torch.int32), (8, 2, torch.int32)],
)
def test_bytes_and_lookups_are_those_of_real_ranks(
    ranks: int, ranks_per_node: int, lengths: torch.dtype, coalesced: bool
) -> None:
    cluster = ClusterShape(ranks // ranks_per_node, ranks_per_node, batch_size=12)
    plan = case_plan(cluster, CostOptions(coalesce=coalesced))
    played = simulate(plan, CaseBatches(lengths.itemsize), cases.STEPS)
    for side in (played.tiered, played.row_wise):
        tiered = side is played.tiered
        seen = run_on_ranks(
            cases.steps,
            ranks,
            tiered,
            lengths,
            coalesced and tiered,
            local_world_size=ranks_per_node,
        )
        assert len(side.tiers) == (4 if tiered else 1)
        for rank in range(ranks):
            for step in range(cases.STEPS):
                expected = {
                    (name, payload): sent[step, rank]
                    for name, tier in side.tiers.items()
                    for payload, sent in (
                        ("integers", tier.sent_integers),
                        ("floats", tier.sent_floats),
                    )
                    if sent[step, rank]
                }
                assert {k: v for k, v in seen[rank][step].sent.items() if v} == expected
                assert seen[rank][step].ids == side.lookups[step, rank]
        for name, tier in side.tiers.items():
            np.testing.assert_array_equal(tier.received.sum(1), tier.sent.sum(1), name)


def zipf_demand(name: str, rows: int, dim: int, seed: int, factor: float = 1.0) -> TableDemand:
    probabilities = 4 * np.arange(1.0, rows + 1.0) ** -1.1
    order = np.random.default_rng(seed).permutation(rows)
    known = rows - 50  # the rest is a tail
    return TableDemand(
        name,
        rows,
        dim,
        probabilities[:known],
        order[:known],
        tail_rows=50,
        tail_probability=float(probabilities[known:].mean()),
        dedupe_factor=factor,
        features=2,
    )


def test_drawn_batches_come_to_what_the_plan_predicts() -> None:
    demands = [zipf_demand("a", 60_000, 16, 0), zipf_demand("b", 9000, 8, 1, factor=2.0)]
    plan = plan_tiers(demands, ClusterShape(8, 4, 256), "three_tier")
    assert all(table.hot and table.flex for table in plan.tables)
    played = simulate(plan, DrawnBatches(plan), 4)
    assert played.a2a_reduction == pytest.approx(plan.a2a_reduction, abs=0.005)
    for name, predicted in traffic(plan).items():
        tier = played.tiered.tiers[name]
        assert tier.sent_floats.mean() == pytest.approx(predicted.float_bytes, rel=0.01)
        assert (tier.collective, tier.group) == (predicted.collective, predicted.group)
        assert predicted.seconds <= tier.seconds.mean() < 1.1 * predicted.seconds
    lookups = sum(256 * d.length for d in demands)
    assert played.row_wise.lookups.mean() == pytest.approx(lookups, rel=0.01)
    assert played.tiered.lookups.mean() < lookups  # b is deduplicated
    assert played.row_wise.memory.mean() == pytest.approx(plan.row_wise_memory_bytes, rel=0.02)


def test_drawn_batches_of_a_coalesced_plan_come_to_what_it_predicts() -> None:
    demands = [zipf_demand("a", 60_000, 16, 0), zipf_demand("b", 9000, 8, 1, factor=2.0)]
    demands[0] = replace(demands[0], distinct=DistinctIds((256,), (1000.0,)))
    options = CostOptions(coalesce=True, minimise="bytes", memory_ratio=3.0, gradient_share=0.4)
    plan = plan_tiers(demands, ClusterShape(8, 4, 256), "three_tier", options)
    assert any(table.flex for table in plan.tables)
    of_a = plan.tables[0]
    assert of_a.hot_sent + of_a.flex_sent + of_a.cold_sent == pytest.approx(1000, rel=1e-3)
    played = simulate(plan, DrawnBatches(plan), 4)
    assert played.a2a_reduction == pytest.approx(plan.a2a_reduction, abs=0.005)
    for name, tier in played.tiered.tiers.items():
        predicted = traffic(plan)[name]
        assert tier.sent_floats.mean() == pytest.approx(predicted.float_bytes, rel=0.01)
        assert tier.sent_integers.mean() == pytest.approx(predicted.integer_bytes, rel=0.01)
    assert played.tiered.lookups.mean() < 0.8 * played.row_wise.lookups.mean()
