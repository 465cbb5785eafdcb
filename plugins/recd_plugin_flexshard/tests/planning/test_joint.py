"""The joint plan is the best of all assignments of rows to tiers."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from benchmarks._flexshard_paper import CLUSTER, MODELS

from recd_plugin_flexshard.planning import (
    ClusterShape,
    Collective,
    Collectives,
    CostOptions,
    TableDemand,
    plan_tiers,
)
from recd_plugin_flexshard.planning.costs import rows_sent
from recd_plugins.runtime.errors import SetupError


# FlexShard's table 2 of one row, sent and looked up so many times by a batch:
# static memory, dynamic memory, bytes in all-to-alls and bytes in all-reduces, of an element.
def row_wise(looked_up, sent, cluster, options):
    dynamic = 2 * sent + (looked_up if options.coalesce else 0)
    return 4 / cluster.world_size, 4 * dynamic, sent * 2 * options.wire_bytes, 0.0


def flex(looked_up, sent, cluster, options):
    _, dynamic, exchanged, _ = row_wise(looked_up, sent, cluster, options)
    node = cluster.ranks_per_node
    return options.memory_multiplier * 4 / node, dynamic, exchanged, 4 / node


def data_parallel(looked_up, sent, cluster, options):
    _, dynamic, _, _ = row_wise(looked_up, sent, cluster, options)
    saved = options.saved_activations * (2 if options.coalesce else 1)
    return options.memory_multiplier * 4, dynamic - 4 * sent * saved, 0.0, 4.0


def best_by_enumeration(tables, cluster, options):
    """The least objective over all 3^rows assignments within the budget; None: none is."""
    rows, plain = [], 0.0
    for table in tables:
        p, dim = table.probabilities, table.embedding_dim
        looked_up = rows_sent(p, cluster.batch_size, table.dedupe_factor)
        sent = rows_sent(p, cluster.batch_size, table.dedupe_factor, options.coalesce)
        rows += [(dim, *pair) for pair in zip(looked_up, sent, strict=True)]
        plain += dim * 4 * (len(p) / cluster.world_size + 2 * p.sum() * cluster.batch_size)
    costs = np.array(
        [
            [dim * np.array(strategy(ids, w, cluster, options)) for dim, ids, w in rows]
            for strategy in (row_wise, flex, data_parallel)
        ]
    )
    missed = np.array([1 - w if options.coalesce else np.exp(-w) for _, _, w in rows])
    missed = np.maximum(missed, 0.0)
    tiers = (0, 1, 2) if cluster.nodes > 1 else (0, 2)
    choices = np.array(np.meshgrid(*[tiers] * len(rows))).reshape(len(rows), -1)

    def total(part, of=(0, 1, 2)):
        chosen = np.zeros_like(costs[..., part])
        chosen[list(of)] = costs[list(of), :, part]
        return chosen[choices, np.arange(len(rows))[:, None]].sum(axis=0)

    def seconds(collective, num_bytes):
        return np.array([collective.seconds_for(each) for each in num_bytes])

    def summed(collective, members, batches, tier):
        num_rows = (choices == tier).sum(axis=0) / (batches if tier == 1 else 1)
        dense = seconds(collective, total(3, of=(tier,)))
        if options.sync == "dense" or members == 1:
            return dense
        touched, union = 1 - missed**batches, 1 - missed ** (batches * members)
        share = (touched + (members - 2) / members * union) / (2 * (members - 1) / members)
        held = costs[tier, :, 3] * share * options.wire_bytes / 4  # by the codecs of all-to-alls
        num_bytes = (held[:, None] * (choices == tier)).sum(axis=0)
        num_bytes += num_rows * members / 16
        calls = 2 if members == 2 else 3
        sparse = calls * collective.seconds * (num_rows > 0)
        sparse = sparse + num_bytes / collective.bytes_per_second
        if options.sync == "sparse":
            return sparse
        if options.minimise == "bytes":
            of_all = total(3, of=(tier,))
            return np.where(num_bytes < of_all, sparse, dense)
        return np.minimum(sparse, dense)

    fits = (total(0) + total(1)) <= (options.memory_ratio * plain * (1 + 1e-12))
    by = cluster.collectives
    hidden = (
        seconds(by.a2a_intra, total(2, of=(1,)))
        + summed(by.ar_cross, cluster.nodes, cluster.ranks_per_node, 1)
        + summed(by.ar_global, cluster.world_size, 1, 2)
    )
    a2a = seconds(by.a2a_global, total(2, of=(0,)))
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
        coalesce=bool(rng.integers(2)),
        overlap=float(rng.choice([0.0, 0.5, 1.0])),
        minimise="bytes" if rng.random() < 0.3 else "time",
        memory_ratio=float(rng.choice([0.5, 0.8, 1.0, 1.2, 2.0, 10.0])),
        sync=sync,
    )
    return demands, cluster, options


SYNCS: tuple[Literal["auto", "dense", "sparse"], ...] = ("dense", "auto", "sparse")


@pytest.mark.parametrize("seed", range(60))
def test_no_assignment_of_rows_is_better(seed):
    tables, cluster, options = random_case(seed, tables=2, rows=4, sync=SYNCS[seed // 3 % 3])
    best = best_by_enumeration(tables, cluster, options)
    if best is None:
        with pytest.raises(SetupError, match="but the budget is"):
            plan_tiers(tables, cluster, "joint", options)
        return
    plan = plan_tiers(tables, cluster, "joint", options)
    assert plan.memory_bytes <= options.memory_ratio * plan.row_wise_memory_bytes * (1 + 1e-9)
    assert plan.seconds.exposed(1 - options.exposed) == pytest.approx(best, rel=1e-6)


JOINT = [
    # dedupe factor, M, coalesced, and the share of the all-to-all saved for RM-1 to RM-4
    (4.0, 6.0, False, (0.913, 0.942, 0.885, 0.931)),
    (6.5, 2.0, False, (0.939, 0.962, 0.922, 0.952)),
    (16.5, 2.0, True, (0.970, 0.983, 0.962, 0.973)),
]


@pytest.mark.parametrize(("factor", "multiplier", "coalesce", "expected"), JOINT)
def test_what_the_joint_plan_saves_of_the_papers_models(factor, multiplier, coalesce, expected):
    options = CostOptions(memory_multiplier=multiplier, coalesce=coalesce)
    for model, reduction in zip(MODELS.values(), expected, strict=True):
        plan = plan_tiers([model.fitted(factor)], CLUSTER, "joint", options)
        assert plan.a2a_reduction == pytest.approx(reduction, abs=1e-3)
        assert plan.memory_bytes <= plan.row_wise_memory_bytes
