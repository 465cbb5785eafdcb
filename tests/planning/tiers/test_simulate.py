"""Simulations against what ranks send, against predictions, and against drawing ids one by one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.planning.tiers import simulate_cases as cases

from recd_plugins.planning.tiers import (
    Cluster,
    TableDemand,
    TableTiers,
    TierPlan,
    plan_tiers,
)
from recd_plugins.planning.tiers.routes import TableRoute
from recd_plugins.planning.tiers.simulate import Lookups, simulate
from recd_plugins.testing.gloo import run_on_ranks


def case_plan(cluster: Cluster) -> TierPlan:
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
    plan = plan_tiers([table.demand for table in tables], cluster, "row_wise")
    return TierPlan(**{**vars(plan), "tables": tuple(tables)})


class CaseBatches:
    """Those of ``simulate_cases``."""

    name = "cases"

    def __init__(self, length_bytes: int) -> None:
        self._length_bytes = length_bytes

    def read(
        self, routes: list[TableRoute], rank: int, steps: int
    ) -> Iterator[tuple[Lookups, Lookups]]:
        for step in range(steps):
            lists = {name: cases.lists(rank, step, name) for name in "abcd"}
            counts = [
                route.counts(np.concatenate([row for name in features for row in lists[name]]))
                for route, features in zip(routes, cases.FEATURES.values(), strict=True)
            ]
            lookups = Lookups(counts, sum(map(len, lists.values())), self._length_bytes)
            yield lookups, lookups


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "lengths"),
    [(4, 2, torch.int32), (4, 4, torch.int64), (4, 1, torch.int32), (8, 2, torch.int32)],
)
def test_bytes_and_lookups_are_those_of_real_ranks(
    ranks: int, ranks_per_node: int, lengths: torch.dtype
) -> None:
    cluster = Cluster(ranks // ranks_per_node, ranks_per_node, batch_size=12)
    played = simulate(case_plan(cluster), CaseBatches(lengths.itemsize), cases.STEPS)
    for side in (played.tiered, played.row_wise):
        tiered = side is played.tiered
        seen = run_on_ranks(cases.steps, ranks, tiered, lengths, local_world_size=ranks_per_node)
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
