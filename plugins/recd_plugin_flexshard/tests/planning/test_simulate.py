"""Simulations against what ranks send, and against predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.distributed as dist

from recd_plugin_flexshard.planning import (
    ClusterShape,
    CostOptions,
    TableDemand,
    TableTiers,
    TierPlan,
    plan_tiers,
    traffic,
)
from recd_plugin_flexshard.planning.simulate import DrawnBatches, StepLookups, TableRoute, simulate
from recd_plugin_flexshard.runtime import RowTiers, tier_groups
from recd_plugin_flexshard.tests.runtime.model import DIM, FEATURES, ROWS, TIERS, Job, model_input
from recd_plugins.interfaces.data_profile import DistinctIds
from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.testing.gloo import run_on_ranks

STEPS = 3
MINE = {**TIERS["three"], "d": RowTiers([4]), "c": RowTiers([], [2, 7, 1])}


class Seen(NamedTuple):
    sent: Counter[tuple[str, str]]
    ids: int


def steps(rank: int, world_size: int, tiered: bool, coalesced: bool) -> list[Seen]:
    tables = tuple(FEATURES) if coalesced else ()
    tiers = MINE if tiered else None
    job = Job("sgd", tiers, sparse=(), coalesced=tables, sends_all=True)
    names = tier_groups().names if tiered else {dist.group.WORLD.group_name: "cold"}
    found = []
    for step in range(STEPS):
        with CollectiveBytes() as counter, lookup_ids(job.dmp) as ids:
            output = job.collection(model_input(rank, step, "kjt").sequence_features)
            sum(jagged.values().sum() for jagged in output.values()).backward()
        sent: Counter[tuple[str, str]] = Counter()
        for each, num_bytes in counter.sent.items():
            if each.group in names:  # else whether somebody has written into a state dict
                sent[names[each.group], each.payload] += num_bytes
        found.append(Seen(+sent, ids.total))
    return found


class SameBatches:
    name = "a test"

    def read(
        self, routes: list[TableRoute], rank: int, steps: int, plain: bool
    ) -> Iterator[StepLookups]:
        for step in range(steps):
            kjt: Any = model_input(rank, step, "kjt").sequence_features
            ids = [
                np.concatenate([kjt[name].values().numpy() for name in features])
                for features in FEATURES.values()
            ]
            coalesced = routes[0].coalesced
            yield StepLookups(
                [
                    route.counts(np.unique(each) if coalesced else each)
                    for route, each in zip(routes, ids, strict=True)
                ],
                len(kjt.keys()) * (1 if coalesced else kjt.stride()) * kjt.lengths().itemsize,
            )


def plan_of_tiers(cluster: ClusterShape, options: CostOptions) -> TierPlan:
    tables = []
    for name, tiers in MINE.items():
        rest = np.setdiff1d(np.arange(ROWS[name]), [*tiers.hot, *tiers.flex])
        rows = np.concatenate([tiers.hot, tiers.flex, rest])
        features = len(FEATURES[name])
        demand = TableDemand(name, ROWS[name], DIM, np.ones(len(rows)), rows, features=features)
        tables.append(TableTiers(demand, len(tiers.hot), len(tiers.flex), 0, 0, 0, 0, 0))
    tables.sort(key=lambda table: table.name)
    plan = plan_tiers([table.demand for table in tables], cluster, "row_wise", options)
    return replace(plan, tables=tuple(tables))


@pytest.mark.parametrize(("nodes", "node", "coalesced"), [(2, 2, False), (4, 1, True)])
def test_bytes_and_lookups_are_those_of_real_ranks(nodes: int, node: int, coalesced: bool) -> None:
    plan = plan_of_tiers(ClusterShape(nodes, node, 12), CostOptions(coalesce=coalesced))
    batches: Any = SameBatches()
    played = simulate(plan, batches, STEPS)
    for tiered, side in ((True, played.tiered), (False, played.row_wise)):
        arguments = (tiered, coalesced and tiered)
        seen = run_on_ranks(steps, nodes * node, *arguments, local_world_size=node)
        for rank, of_rank in enumerate(seen):
            for step, found in enumerate(of_rank):
                expected = Counter[tuple[str, str]]()
                for name, tier in side.tiers.items():
                    expected[name, "integers"] = tier.sent_integers[step, rank]
                    expected[name, "floats"] = tier.sent_floats[step, rank]
                assert found.sent == +expected
                assert found.ids == side.lookups[step, rank]


def demand(name: str, rows: int, dim: int, seed: int, factor: float = 1.0) -> TableDemand:
    probabilities = 4 * np.arange(1.0, rows + 1.0) ** -1.1
    known = rows - 50  # the rest is a tail
    order = np.random.default_rng(seed).permutation(rows)[:known]
    more: dict[str, Any] = {"dedupe_factor": factor, "features": 2, "tail_rows": 50}
    more["tail_probability"] = float(probabilities[known:].mean())
    return TableDemand(name, rows, dim, probabilities[:known], order, **more)


@pytest.mark.parametrize("coalesced", [False, True])
def test_drawn_batches_come_to_what_the_plan_predicts(coalesced: bool) -> None:
    demands = [demand("a", 60_000, 16, 0), demand("b", 9000, 8, 1, factor=2.0)]
    options = CostOptions()
    if coalesced:
        demands[0] = replace(demands[0], distinct=DistinctIds((256,), (1000.0,)))
        options = CostOptions(coalesce=True, minimise="bytes", memory_ratio=3)
    plan = plan_tiers(demands, ClusterShape(8, 4, 256), "three_tier", options)
    assert all(table.hot and table.flex for table in plan.tables) or coalesced
    played = simulate(plan, DrawnBatches(plan), 4)
    assert played.a2a_reduction == pytest.approx(plan.a2a_reduction, abs=0.005)
    for name, predicted in traffic(plan).items():
        if (tier := played.tiered.tiers.get(name)) is None:
            assert not predicted.bytes
            continue
        assert tier.sent_floats.mean() == pytest.approx(predicted.float_bytes, rel=0.01)
        assert tier.sent_integers.mean() == pytest.approx(predicted.integer_bytes, rel=0.01)
        assert predicted.seconds <= tier.seconds.mean() < 1.15 * predicted.seconds
    lookups = sum(256 * d.length for d in demands)
    assert played.row_wise.lookups.mean() == pytest.approx(lookups, rel=0.01)
    assert played.tiered.lookups.mean() < lookups  # b is deduplicated
