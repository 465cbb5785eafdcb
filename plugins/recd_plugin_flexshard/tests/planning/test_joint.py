"""The joint plan is the best of all assignments of rows to tiers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from recd_plugin_flexshard.planning import (
    PAPER,
    PAPER_FLAT,
    ClusterShape,
    Collective,
    Collectives,
    CostOptions,
    TableDemand,
    breakpoints,
    plan_tiers,
)
from recd_plugin_flexshard.planning.costs import Load, data_parallel, flex, row_wise, rows_sent
from recd_plugin_flexshard.planning.paper import CLUSTER, MODELS, OPTIONS
from recd_plugin_flexshard.planning.ranking import TableRanking
from recd_plugins.errors import SetupError


def best_by_enumeration(tables, cluster, options):
    """The least objective over all 3^rows assignments within the budget; None: none is."""
    rows, plain = [], 0.0
    for table in tables:
        p, dim = table.probabilities, table.embedding_dim
        looked_up = rows_sent(p, cluster.batch_size, table.dedupe_factor)
        sent = rows_sent(p, cluster.batch_size, table.dedupe_factor, options.coalesce)
        rows += [Load(1, dim, *pair) for pair in zip(looked_up, sent, strict=True)]
        ids = float(p.sum() * cluster.batch_size)
        cost = row_wise(Load(len(p), dim, ids, ids), cluster, replace(options, coalesce=False))
        plain += cost.static_memory + cost.dynamic_memory
    costs = [
        [strategy(row, cluster, options) for row in rows]
        for strategy in (row_wise, flex, data_parallel)
    ]
    tiers = (0, 1, 2) if cluster.nodes > 1 else (0, 2)
    choices = np.array(np.meshgrid(*[tiers] * len(rows))).reshape(len(rows), -1)

    def total(value, of=(0, 1, 2)):
        table = np.array(
            [[value(cost) if tier in of else 0.0 for cost in costs[tier]] for tier in range(3)]
        )
        return table[choices, np.arange(len(rows))[:, None]].sum(axis=0)

    def seconds(collective, num_bytes):
        return np.array([collective.seconds_for(each) for each in num_bytes])

    def summed(collective, members, batches, tier):
        """Seconds of the gradients of a tier, by the sync that is cheaper of those allowed."""
        num_rows = (choices == tier).sum(axis=0) / (batches if tier == 1 else 1)
        dense = seconds(collective, total(lambda cost: cost.static_comm, of=(tier,)))
        if options.sync == "dense" or members == 1:
            return dense
        if options.coalesce:
            missed = np.array([max(0.0, 1 - row.sent) for row in rows])
        else:
            missed = np.exp([-row.sent for row in rows])
        touched, union = 1 - missed**batches, 1 - missed ** (batches * members)
        share = (touched + (members - 2) / members * union) / (2 * (members - 1) / members)
        share *= options.wire_bytes / options.bytes_per_scalar  # by the codecs of all-to-alls
        held = [costs[tier][number].static_comm * share[number] for number in range(len(rows))]
        num_bytes = (np.array(held)[:, None] * (choices == tier)).sum(axis=0)
        num_bytes += num_rows * members / 16
        calls = 2 if members == 2 else 3
        sparse = calls * collective.seconds * (num_rows > 0)
        sparse = sparse + num_bytes / collective.bytes_per_second
        if options.sync == "sparse":
            return sparse
        if options.minimise == "bytes":
            of_all = total(lambda cost: cost.static_comm, of=(tier,))
            return np.where(num_bytes < of_all, sparse, dense)
        return np.minimum(sparse, dense)

    fits = total(lambda cost: cost.static_memory + cost.dynamic_memory) <= (
        options.memory_ratio * plain * (1 + 1e-12)
    )
    by = cluster.collectives
    hidden = (
        seconds(by.a2a_intra, total(lambda cost: cost.dynamic_comm, of=(1,)))
        + summed(by.ar_cross, cluster.nodes, cluster.ranks_per_node, 1)
        + summed(by.ar_global, cluster.world_size, 1, 2)
    )
    a2a = seconds(by.a2a_global, total(lambda cost: cost.dynamic_comm, of=(0,)))
    objective = a2a + options.exposed * hidden
    return float(objective[fits].min()) if fits.any() else None


def random_case(
    seed: int, tables: int, rows: int, sync: Literal["auto", "dense", "sparse"] = "dense"
):
    rng = np.random.default_rng(seed)
    demands = []
    for index in range(tables):
        p = np.sort(rng.random(rows) ** rng.integers(1, 6))[::-1].copy()
        if seed % 3 == 0:
            p = np.round(p, 1)  # Equal ones, and rows that are never accessed.
        factor = float(rng.choice([1.0, 1.5, 4.0]))
        demands.append(TableDemand(f"t{index}", rows, 8, p, dedupe_factor=factor))
    flat = bool(rng.integers(2))

    def collective(scale):
        return Collective(scale * rng.uniform(0.3, 3), 0.0 if flat else rng.uniform(0, 3e-6))

    collectives = Collectives(*(collective(scale) for scale in (1e9, 8e9, 2e9, 4e9)))
    cluster = ClusterShape(
        int(rng.integers(1, 5)), int(rng.integers(1, 9)), int(rng.integers(2, 40)), collectives
    )
    options = CostOptions(
        memory_multiplier=float(rng.choice([1.0, 2.0, 6.0])),
        saved_activations=float(rng.choice([0.5, 1.0])),
        wire_bytes=float(rng.choice([2, 4])),
        activation_bytes=float(rng.choice([2, 4])),
        coalesce=bool(rng.integers(2)),
        overlap=float(rng.choice([0.0, 0.5, 1.0])),
        minimise="bytes" if rng.random() < 0.3 else "time",
        memory_ratio=float(rng.choice([0.5, 0.8, 1.0, 1.2, 2.0, 10.0])),
        sync=sync,
    )
    return demands, cluster, options


@pytest.mark.parametrize("seed", range(60))
def test_no_assignment_of_rows_is_better(seed):
    tables, cluster, options = random_case(seed, tables=2, rows=4)
    best = best_by_enumeration(tables, cluster, options)
    if best is None:
        with pytest.raises(SetupError, match="are allowed"):
            plan_tiers(tables, cluster, "joint", options)
        return
    plan = plan_tiers(tables, cluster, "joint", options)
    assert plan.memory_bytes <= options.memory_ratio * plan.row_wise_memory_bytes * (1 + 1e-9)
    assert plan.seconds.exposed(1 - options.exposed) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("sync", ["auto", "sparse"])
@pytest.mark.parametrize("seed", range(40))
def test_no_assignment_is_better_where_touched_rows_alone_are_summed(seed, sync):
    tables, cluster, options = random_case(200 + seed, tables=2, rows=4, sync=sync)
    best = best_by_enumeration(tables, cluster, options)
    if best is None:
        with pytest.raises(SetupError, match="are allowed"):
            plan_tiers(tables, cluster, "joint", options)
        return
    plan = plan_tiers(tables, cluster, "joint", options)
    assert plan.seconds.exposed(1 - options.exposed) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", [101, 102])
def test_no_assignment_of_ten_rows_is_better(seed):
    tables, cluster, options = random_case(seed, tables=1, rows=10)
    options = replace(options, memory_ratio=1.2)
    cluster = replace(cluster, nodes=2)
    plan = plan_tiers(tables, cluster, "joint", options)
    best = best_by_enumeration(tables, cluster, options)
    assert plan.seconds.exposed(1 - options.exposed) == pytest.approx(best, rel=1e-6)


def test_where_tables_have_several_dimensions_it_is_the_best_but_for_a_row():
    tables, cluster, options = random_case(7, tables=2, rows=4)
    tables[1] = replace(tables[1], embedding_dim=32)
    options = replace(options, memory_ratio=1.2)
    plan = plan_tiers(tables, cluster, "joint", options)
    best = best_by_enumeration(tables, cluster, options)
    assert best is not None
    a_row = 2 * options.wire_bytes * 32 * cluster.batch_size / 1e8
    assert best <= plan.seconds.exposed(1 - options.exposed) * (1 + 1e-9) <= best + a_row


def test_rows_of_a_table_are_added_up_once(monkeypatch):
    """Each prefix of a bisection differs in few tables from the one before."""
    added, asked = Counter(), []  # which stay, so that no other has their id
    total = TableRanking._total

    def counted(self, rows, sums, of):
        asked.append(self)
        added[id(self), rows] += sums is self._sums
        return total(self, rows, sums, of)

    monkeypatch.setattr(TableRanking, "_total", counted)
    tables, cluster, options = random_case(3, tables=6, rows=50, sync="auto")
    plan_tiers(tables, replace(cluster, nodes=2), "joint", replace(options, memory_ratio=1.2))
    assert added.total() > 20
    assert max(added.values()) == 1


PAPER_STYLE = {"RM-1": 0.674, "RM-2": 0.857, "RM-3": 0.486, "RM-4": 0.750}
JOINT = [
    # dedupe factor, M, coalesced, and the share of the all-to-all saved for RM-1 to RM-4
    (4.0, 6.0, False, (0.913, 0.942, 0.885, 0.931)),
    (6.5, 2.0, False, (0.939, 0.962, 0.922, 0.952)),
    (16.5, 2.0, True, (0.970, 0.983, 0.962, 0.973)),
]


@pytest.mark.parametrize("name", MODELS)
def test_what_three_tiers_save_of_the_papers_models(name):
    plan = plan_tiers([MODELS[name].fitted()], CLUSTER, "three_tier", OPTIONS)
    assert plan.a2a_reduction == pytest.approx(PAPER_STYLE[name], abs=1e-3)


@pytest.mark.parametrize(("factor", "multiplier", "coalesce", "expected"), JOINT)
def test_what_the_joint_plan_saves_of_the_papers_models(factor, multiplier, coalesce, expected):
    options = CostOptions(memory_multiplier=multiplier, coalesce=coalesce)
    for model, reduction in zip(MODELS.values(), expected, strict=True):
        plan = plan_tiers([model.fitted(factor)], CLUSTER, "joint", options)
        assert plan.a2a_reduction == pytest.approx(reduction, abs=1e-3)
        assert plan.memory_bytes <= plan.row_wise_memory_bytes


@pytest.mark.parametrize("collectives", [PAPER_FLAT, PAPER])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_the_joint_plan_takes_no_more_time_than_any_other(collectives, overlap):
    cluster = replace(CLUSTER, collectives=collectives)
    options = CostOptions(overlap=overlap)
    for model in MODELS.values():
        seconds = {
            strategy: plan_tiers([model.fitted()], cluster, strategy, options).seconds
            for strategy in ("row_wise", "two_tier", "three_tier", "joint")
        }
        joint = seconds.pop("joint").exposed(overlap)
        assert joint <= min(each.exposed(overlap) for each in seconds.values()) * (1 + 1e-9)


@pytest.mark.parametrize("collectives", [PAPER_FLAT, PAPER])
def test_without_overlap_three_tiers_are_slower_than_two_on_rm2(collectives):
    cluster = replace(CLUSTER, collectives=collectives)
    for name, model in MODELS.items():
        two, three = (
            plan_tiers([model.fitted()], cluster, strategy, OPTIONS).seconds.exposed()
            for strategy in ("two_tier", "three_tier")
        )
        assert two == pytest.approx(model.two_tier_seconds, rel=0.1)
        assert three == pytest.approx(model.three_tier_seconds, rel=0.12)
        assert (three > two) == (name == "RM-2")


def test_coalesced_a_row_pays_in_memory_only_where_it_takes_less_than_two_rows():
    for multiplier, pays in ((1.9, True), (2.0, True), (2.1, False)):
        options = CostOptions(memory_multiplier=multiplier, coalesce=True)
        assert (breakpoints(CLUSTER, options)["mem_dp_rw"] < np.inf) == pays
        at_no_budget = replace(options, memory_bytes=1.0)
        with pytest.raises(SetupError, match=r"with [\d,]+ rows on all") as error:
            plan_tiers([MODELS["RM-2"].fitted()], CLUSTER, "two_tier", at_no_budget)
        assert ("with 0 rows" in str(error.value)) == (not pays)


def test_one_node_has_no_flex_rows():
    cluster = replace(CLUSTER, nodes=1, ranks_per_node=32)
    plan = plan_tiers([MODELS["RM-2"].fitted()], cluster, "joint", CostOptions())
    assert plan.tables[0].flex == 0
    assert plan.tables[0].hot > 0
