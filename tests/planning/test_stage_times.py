"""Seconds from work: what costs are fitted to is what they predict."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from recd_plugins.planning.stage_times import predict_stages
from recd_plugins.planning.topologies import load_topology, this_machine
from recd_plugins.values.stage_costs import (
    AllReduceCost,
    AllToAllCost,
    GemmCost,
    LookupCost,
    OtherCost,
    StageCosts,
)
from recd_plugins.values.work import Work

COSTS = StageCosts(
    lookup=LookupCost(steps=1e-3, bytes_looked_up=2e-9),
    gemm=GemmCost(matmul_flops=1e-10, attention_flops=5e-10),
    all_to_all=AllToAllCost(collectives=1e-4, bytes_in_node=1e-9),
    other=OtherCost(steps=2e-3, element_bytes=1e-10, ids_read=1e-8),
)


def work(scale: float, collectives: int = 4, ids: float = 1e5) -> Work:
    return Work(
        ids_looked_up=ids,
        bytes_looked_up=1e6 * scale,
        collectives=collectives,
        bytes_in_node=2e6 * scale,
        matmul_flops=1e8 * scale,
        attention_flops=3e8 * scale**2,
        element_bytes=1e8 * scale,
        ids_read=1e6 * scale**0.5,
    )


def test_ranks_with_less_work_wait_in_the_all_to_all() -> None:
    even, uneven = [work(2), work(2)], [work(1), work(3)]
    alone = predict_stages(even, COSTS)
    assert predict_stages([work(2)], COSTS) == alone
    most = predict_stages([work(3)], COSTS)
    assert predict_stages(uneven, COSTS).total == pytest.approx(most.total)


@pytest.mark.parametrize(
    ("alone", "seconds"),
    [
        (1.0, 4),
        # Two processors of four ranks: all take half, then one has a processor.
        (0.5, 1 + 3 * 0.5),
        # One: nobody waits.
        (0.25, (1 + 1 + 1 + 4) / 4),
    ],
)
def test_a_rank_has_the_processors_of_those_that_are_done(alone: float, seconds: float) -> None:
    costs = StageCosts(lookup=LookupCost(lookups=1.0), alone=alone)
    works = [Work(lookups=calls) for calls in (1, 4, 1, 1)]
    assert predict_stages(works, costs).total == pytest.approx(seconds)


@pytest.mark.parametrize(("cost", "seconds"), [({}, 4 + 6), ({"bytes_waited_for": 0.5}, 4 + 3)])
def test_a_link_with_more_to_carry_does_so_at_its_own_rate(
    cost: dict[str, float], seconds: float
) -> None:
    costs = StageCosts(all_to_all=AllToAllCost(bytes_across_nodes=1.0, **cost))
    owner = Work(bytes_across_nodes=8, bytes_waited_for=6)
    others = [Work(bytes_across_nodes=2, bytes_waited_for=6)] * 2
    assert predict_stages([owner, *others], costs).all_to_all == seconds


@pytest.mark.parametrize(("idle", "share"), [(1.0, 1.0), (0.5, 0.5 + 0.5 * 0.25), (0.0, 0.25)])
def test_a_rank_has_the_processors_of_those_that_wait_for_its_bytes(
    idle: float, share: float
) -> None:
    """As far as it is processors that carry them, not links."""
    costs = StageCosts(all_to_all=AllToAllCost(bytes_waited_for=1.0), alone=0.25, idle_links=idle)
    works = [Work(bytes_waited_for=6)] * 4
    assert predict_stages(works, costs).all_to_all == pytest.approx(6 * share)


@pytest.mark.parametrize(("hidden", "left"), [(0.0, 3.0), (0.5, 2.0), (1.0, 1.0)])
def test_ranks_that_compute_hide_an_all_reduce_for_as_long(hidden: float, left: float) -> None:
    works = [Work(bytes_looked_up=2e9, bytes_reduced=3e9)]
    costs = StageCosts(
        lookup=LookupCost(bytes_looked_up=1e-9),
        all_reduce=AllReduceCost(bytes_reduced=1e-9),
        hidden=hidden,
    )
    assert predict_stages(works, costs).all_reduce == pytest.approx(3)
    # Lookups take 2 seconds: what is left of the all-reduce comes after them.
    assert predict_stages(works, costs, overlapped=True).all_reduce == pytest.approx(left)


def test_links_are_idle_while_collectives_begin() -> None:
    work = Work(bytes_looked_up=1e9, collectives=4, bytes_across_nodes=9e9, bytes_reduced=3e9)
    costs = StageCosts(
        lookup=LookupCost(bytes_looked_up=1e-9),
        all_to_all=AllToAllCost(bytes_across_nodes=1e-9, collectives=0.5),
        all_reduce=AllReduceCost(bytes_reduced=1e-9, steps=0.25),
        hidden=1.0,
        spared=5.0,
    )
    step = predict_stages([work] * 2, costs)
    # 9 + 3 seconds of bytes, but what links carry in 1 of computing and 2.25 of latencies.
    assert step.all_to_all + step.all_reduce == pytest.approx(12 + 2.25 - 3.25)
    few = replace(work, bytes_across_nodes=1e9, bytes_reduced=1e9)
    # All bytes: what is left are latencies.
    left = predict_stages([few] * 2, costs)
    assert left.all_to_all == pytest.approx(2.0)
    assert left.all_reduce == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("collectives", "sent", "reduced", "computed", "left"),
    [
        (4, 10e9, 0.0, 5e9, 9.0),  # half a second each second one
        (4, 10e9, 3e9, 5e9, 9.0 + 2.5),
        (40, 10e9, 0.0, 5e9, 5.0),  # no more than ranks compute
        (39, 20e9, 3e9, 5e9, 23.0 - 5.0),
        (40, 2e9, 0.1e9, 5e9, 0.0),  # nor than is sent
    ],
)
def test_links_spare_what_they_could_have_carried_while_ranks_computed(
    collectives: float, sent: float, reduced: float, computed: float, left: float
) -> None:
    work = Work(bytes_looked_up=computed, collectives=collectives, bytes_reduced=reduced)
    works = [replace(work, bytes_across_nodes=sent)] * 2
    costs = StageCosts(
        lookup=LookupCost(bytes_looked_up=1e-9),
        all_to_all=AllToAllCost(bytes_across_nodes=1e-9),
        all_reduce=AllReduceCost(bytes_reduced=1e-9),
        hidden=1.0,
        spared=0.5,
    )
    step = predict_stages(works, costs)
    assert step.all_to_all + step.all_reduce == pytest.approx(left)
    processors_limit = predict_stages(works, costs.model_copy(update={"hidden": 0.0}))
    assert processors_limit.all_to_all == pytest.approx(sent * 1e-9)
    assert processors_limit.all_reduce == pytest.approx(reduced * 1e-9)


@pytest.mark.parametrize(
    ("alone", "idle", "sent", "saved"),
    [
        (1.0, 1.0, 9e9, 0.0),  # processors of their own
        (0.5, 0.0, 3e9, 0.0),  # processors carry the bytes
        (0.5, 1.0, 3e9, 3 * (1 - 3 / 9)),  # 3 of 9 seconds both wait
        (0.5, 0.5, 3e9, 1.5 * (1 - 1.5 / 9)),
        (0.5, 1.0, 9e9, 3.0),  # no more than half of 2 seconds of computing and 4 of latencies
        (0.25, 1.0, 2e9, 2 * (1 - (2 / 8) ** 3)),
    ],
)
def test_ranks_that_share_processors_compute_while_others_wait_for_links(
    alone: float, idle: float, sent: float, saved: float
) -> None:
    works = [Work(bytes_looked_up=2e9, collectives=4, bytes_across_nodes=sent)] * 2
    costs = StageCosts(
        lookup=LookupCost(bytes_looked_up=1e-9),
        all_to_all=AllToAllCost(bytes_across_nodes=1e-9, collectives=1.0),
        alone=alone,
        idle_links=idle,
    )
    assert predict_stages(works, costs).all_to_all == pytest.approx(4.0 + sent * 1e-9 - saved)


def test_ranks_gain_nothing_where_some_wait_for_all_of_the_step() -> None:
    """A part may bring bytes to one link alone: that is waited for longer than ranks take."""
    works = [Work(bytes_waited_for=4e9), *[Work()] * 3]
    costs = StageCosts(all_to_all=AllToAllCost(bytes_waited_for=1e-9), alone=0.25)
    assert predict_stages(works, costs).all_to_all == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("alone", "idle", "left"),
    [
        (1.0, 0.5, 1.0),  # processors of their own: nothing is filled
        (0.5, 0.0, 1.0),
        (0.5, 0.5, 1 - 0.5 * (1 - 0.25)),  # 2.5 of 10 seconds are idle
        (0.25, 0.5, 1 - 0.5 * (1 - 0.25**3)),
    ],
)
def test_ranks_that_share_processors_compute_while_others_wait_in_collectives(
    alone: float, idle: float, left: float
) -> None:
    works = [Work(bytes_looked_up=5e9, collectives=4)] * 2
    costs = StageCosts(
        lookup=LookupCost(bytes_looked_up=1e-9),
        all_to_all=AllToAllCost(collectives=1.0),
        all_reduce=AllReduceCost(steps=1.0),
        alone=alone,
        idle=idle,
    )
    works = [replace(work, steps=1.0) for work in works]
    step = predict_stages(works, costs)
    assert step.all_to_all == pytest.approx(4 * left)
    assert step.all_reduce == pytest.approx(left)
    assert step.lookup == pytest.approx(5)


def test_topologies_give_lower_bounds() -> None:
    topology = load_topology("dgx-h100", nodes=2)
    costs = topology.least_costs
    assert costs.gemm.matmul_flops == 1 / topology.flops
    assert costs.all_to_all.bytes_across_nodes == 1 / topology.inter_node_bandwidth
    sent = 2 * 15 / 16  # of a tensor, by each of 16 ranks
    assert costs.all_reduce.bytes_reduced * sent == pytest.approx(
        1 / topology.collective_rates.ar_global.bytes_per_second
    )
    cpu = this_machine(2)
    assert cpu.least_costs.lookup.bytes_looked_up == 3 / cpu.ddr_bandwidth
    assert cpu.least_costs.lookup.bytes_from_host == 1 / cpu.ddr_bandwidth
    assert topology.hbm_to_ddr_bandwidth
    assert costs.lookup.bytes_from_host == 1 / topology.hbm_to_ddr_bandwidth


def test_costs_as_a_section_of_a_file() -> None:
    assert StageCosts.model_validate(COSTS.model_dump()) == COSTS
    with pytest.raises(ValidationError, match="per_flop"):
        StageCosts.model_validate({"gemm": {"per_flop": 1.0}})
    with pytest.raises(ValidationError, match="greater than or equal"):
        StageCosts.model_validate({"gemm": {"steps": -1.0}})
    with pytest.raises(ValidationError) as error:
        StageCosts.model_validate({"all_to_all": {"bytes_across_nodes": -1.0}})
    assert error.value.error_count() == 1  # of what the file has, and of nothing else


@pytest.mark.parametrize("ranks", [3, 7, 24, 1024])
def test_ranks_with_equal_work_wait_for_none(ranks: int) -> None:
    assert predict_stages([Work(element_bytes=0.1)] * ranks, COSTS).all_to_all == 0.0
