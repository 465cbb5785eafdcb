"""Seconds from work: what costs are fitted to is what they predict."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from recd_plugins.interfaces.step_cost import (
    AllReduceCost,
    AllToAllCost,
    GemmCost,
    LookupCost,
    OtherCost,
    StageCosts,
    StepCost,
)
from recd_plugins.planning.step_cost import predict_stages
from recd_plugins.planning.topologies import load_topology, this_machine

COSTS = StageCosts(
    lookup=LookupCost(steps=1e-3, bytes_looked_up=2e-9),
    gemm=GemmCost(matmul_flops=1e-10),
    all_to_all=AllToAllCost(collectives=1e-4, bytes_in_node=1e-9),
    other=OtherCost(steps=2e-3, element_bytes=1e-10, operators=1e-8),
)


def work(scale: float, collectives: int = 4, ids: float = 1e5) -> StepCost:
    return StepCost(
        ids_looked_up=ids,
        bytes_looked_up=1e6 * scale,
        collectives=collectives,
        bytes_in_node=2e6 * scale,
        matmul_flops=1e8 * scale,
        element_bytes=1e8 * scale,
        operators=1e6 * scale**0.5,
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
    works = [StepCost(lookups=calls) for calls in (1, 4, 1, 1)]
    assert predict_stages(works, costs).total == pytest.approx(seconds)


@pytest.mark.parametrize(("hidden", "left"), [(0.0, 3.0), (0.5, 2.0), (1.0, 1.0)])
def test_ranks_that_compute_hide_an_all_reduce_for_as_long(hidden: float, left: float) -> None:
    works = [StepCost(bytes_looked_up=2e9, bytes_reduced=3e9)]
    costs = StageCosts(
        lookup=LookupCost(bytes_looked_up=1e-9),
        all_reduce=AllReduceCost(bytes_reduced=1e-9),
        hidden=hidden,
    )
    assert predict_stages(works, costs).all_reduce == pytest.approx(3)
    # Lookups take 2 seconds: what is left of the all-reduce comes after them.
    assert predict_stages(works, costs, overlapped=True).all_reduce == pytest.approx(left)


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
    assert predict_stages([StepCost(element_bytes=0.1)] * ranks, COSTS).all_to_all == 0.0
