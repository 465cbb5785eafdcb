"""The strategy table, the breakpoints, and how often rows are sent."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest

from recd_plugin_flexshard.planning import (
    PAPER,
    ClusterShape,
    Collective,
    CollectiveSeconds,
    CostOptions,
    breakpoints,
)
from recd_plugin_flexshard.planning.costs import (
    Load,
    column_wise,
    data_parallel,
    flex,
    row_wise,
    rows_sent,
)
from recd_plugin_flexshard.planning.paper import CLUSTER
from recd_plugin_flexshard.tests.planning.test_cuts import FLAT, STEEP
from recd_plugins.errors import SetupError

E, D, L, B, S = 1000, 16, 5.0, 4096, 64


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # Static memory, input ids, rows read, dynamic memory, dynamic and static communication.
        (row_wise, (E * S / 32, B * L, B * L, 2 * B * L * S, 2 * B * L * S, 0)),
        (column_wise, (E * S / 32, 32 * B * L, 32 * B * L, 2 * B * L * S, 2 * B * L * S, 0)),
        (data_parallel, (6 * E * S, 0, B * L, B * L * S, 0, E * S)),
        (flex, (6 * E * S / 8, B * L, B * L, 2 * B * L * S, 2 * B * L * S, E / 8 * S)),
    ],
)
def test_the_strategy_table(strategy, expected):
    load = Load(E, D, B * L, B * L)
    assert astuple(strategy(load, CLUSTER, CostOptions())) == pytest.approx(expected)


def test_coalesced_rows_take_memory_beside_those_of_all_ids():
    load, options = Load(E, D, lookups=1000, sent=300), CostOptions(coalesce=True)
    assert row_wise(load, CLUSTER, options).dynamic_memory == (1000 + 2 * 300) * S
    assert data_parallel(load, CLUSTER, options).dynamic_memory == 1000 * S
    assert data_parallel(load, CLUSTER, options).rows_read == 1000
    assert flex(load, CLUSTER, options).dynamic_comm == 2 * 300 * S


def test_dtypes_and_multipliers_scale_what_they_are_of():
    load = Load(E, D, B * L, B * L)
    plain = CostOptions()
    for options, changed in (
        (replace(plain, activation_bytes=2), {"dynamic_memory": 0.5}),
        (replace(plain, wire_bytes=2), {"dynamic_comm": 0.5}),
        (replace(plain, bytes_per_scalar=2), {"static_memory": 0.5, "static_comm": 0.5}),
        (replace(plain, memory_multiplier=2), {"static_memory": 1 / 3}),
    ):
        before, after = flex(load, CLUSTER, plain), flex(load, CLUSTER, options)
        for name in ("static_memory", "dynamic_memory", "dynamic_comm", "static_comm"):
            assert getattr(after, name) == getattr(before, name) * changed.get(name, 1)
    once = replace(plain, gradient_share=0.25)
    assert row_wise(load, CLUSTER, once).dynamic_comm == 1.25 * B * L * S
    assert flex(load, CLUSTER, once) == flex(load, CLUSTER, plain)
    two = CostOptions(saved_activations=0.5)
    assert data_parallel(load, CLUSTER, two).dynamic_memory == 1.5 * B * L * S


def test_breakpoints():
    found = breakpoints(CLUSTER, CostOptions())
    assert found["mem_dp_rw"] == pytest.approx(1.4572e-3, abs=5e-8)
    assert found["mem_dp_flex"] == pytest.approx(1.2817e-3, abs=5e-8)
    assert found["comm_dp_rw"] == pytest.approx(2.50e-5, rel=2e-3)
    # 4.917e-5 with the bandwidths as they are rounded.
    assert found["comm_flex_rw"] == pytest.approx(4.95e-5, rel=1e-2)


def test_breakpoints_under_other_options():
    plain = breakpoints(CLUSTER, CostOptions())
    half = breakpoints(CLUSTER, CostOptions(activation_bytes=2))
    assert half["mem_dp_rw"] == pytest.approx(2 * plain["mem_dp_rw"])
    half = breakpoints(CLUSTER, CostOptions(wire_bytes=2))
    assert half["comm_dp_rw"] == pytest.approx(2 * plain["comm_dp_rw"])
    hidden = breakpoints(CLUSTER, CostOptions(overlap=0.75))
    assert hidden["comm_dp_rw"] == pytest.approx(plain["comm_dp_rw"] / 4)
    cheaper = breakpoints(CLUSTER, CostOptions(gradient_share=0.5))
    assert cheaper["comm_dp_rw"] == pytest.approx(plain["comm_dp_rw"] / 0.75)
    assert cheaper["comm_flex_rw"] > plain["comm_flex_rw"]
    by_bytes = breakpoints(CLUSTER, CostOptions(minimise="bytes"))
    assert by_bytes["comm_flex_rw"] < 1e-12
    slow = replace(CLUSTER.collectives, a2a_intra=Collective(1e9))
    assert breakpoints(replace(CLUSTER, collectives=slow), CostOptions())["comm_flex_rw"] == np.inf
    coalesced = breakpoints(CLUSTER, CostOptions(coalesce=True, memory_multiplier=1.9))
    assert 1 - (1 - coalesced["mem_dp_rw"]) ** B == pytest.approx((1.9 - 1 / 32) / 2)


@pytest.mark.parametrize(("demand", "unique"), [(FLAT, 121442.4), (STEEP, 4225.3)])
def test_distinct_rows_of_a_batch(demand, unique):
    sent = rows_sent(demand.probabilities, B, coalesce=True)
    assert sent.sum() == pytest.approx(unique, abs=0.1)
    assert rows_sent(demand.probabilities, B, 4.0).sum() == pytest.approx(B * demand.length / 4)


def test_a_row_of_every_sample_is_in_every_batch():
    sent = rows_sent(np.array([3.0, 1.0, 0.5, 0.0]), 2, coalesce=True)
    assert sent.tolist() == [1.0, 1.0, 0.75, 0.0]


def test_seconds():
    assert PAPER.a2a_global.seconds_for(25.6e9) == pytest.approx(1.0075)
    assert PAPER.a2a_global.seconds_for(0.0) == 0.0
    assert CollectiveSeconds(1.0, 2.0, 3.0, 4.0).exposed(0.5) == 5.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_multiplier", 0.5),
        ("saved_activations", -1.0),
        ("overlap", 1.1),
        ("minimise", "money"),
        ("stop", "rw"),
        ("memory_ratio", 0.0),
        ("memory_bytes", float("nan")),
        ("wire_bytes", 0),
        ("gradient_share", 0.0),
        ("gradient_share", 1.5),
    ],
)
def test_options_that_make_no_sense(name, value):
    with pytest.raises(SetupError, match=name):
        CostOptions(**{name: value})


def test_clusters_that_make_no_sense():
    with pytest.raises(SetupError, match="1 node"):
        ClusterShape(0, 8, 4096)
    with pytest.raises(SetupError, match="bandwidth above 0"):
        Collective(0.0)
