"""Seconds from work: what costs are fitted to is what they predict."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from recd_plugins import load_registry
from recd_plugins.planning.stage_times import predict
from recd_plugins.planning.stages import STAGES, StageTimes
from recd_plugins.planning.topologies import load_topology, this_machine
from recd_plugins.training.calibrate import CalibrationPoint, calibrate, fit
from recd_plugins.training.trainer import Job
from recd_plugins.values.stage_costs import (
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


def point(one: Work) -> CalibrationPoint:
    return CalibrationPoint("plugins", 1, [one, one], [predict([one], COSTS)] * 2, fitted=True)


def test_costs_are_found_again() -> None:
    points = [point(work(1)), point(work(4)), point(work(2, collectives=12)), point(work(9))]
    found = fit(points, StageCosts(all_to_all=AllToAllCost(bytes_across_nodes=7.0)))
    new = [work(3, collectives=8)]
    for stage in STAGES:
        assert getattr(predict(new, found), stage) == pytest.approx(
            getattr(predict(new, COSTS), stage), rel=1e-3, abs=1e-9
        )
    assert found.all_to_all.bytes_across_nodes == 7.0  # there was no such work
    assert all(value >= 0 for stage in STAGES for value in getattr(found, stage).__dict__.values())


def test_less_time_for_more_work_costs_nothing() -> None:
    few, many = (
        CalibrationPoint(
            "plugins", 1, [work(scale)], [StageTimes(0.1, seconds, 0, 0, 0)], fitted=True
        )
        for scale, seconds in ((1, 2.0), (4, 1.0))
    )
    gemm = fit([few, many], StageCosts()).gemm
    assert gemm.matmul_flops == gemm.attention_flops == 0 < gemm.steps


def test_what_ranks_wait_in_turns_is_a_cost_and_what_work_explains_is_not() -> None:
    def cost(*ranks: StageTimes) -> float:
        one = CalibrationPoint("plugins", 1, [work(1), work(1)], list(ranks), fitted=True)
        return predict([work(1)], fit([one], StageCosts())).all_to_all

    in_turns = cost(StageTimes(0, 5, 1, 0, 0), StageTimes(0, 5, 3, 0, 0))
    assert in_turns == pytest.approx(2)
    explained = cost(StageTimes(0, 7, 1, 0, 0), StageTimes(0, 3, 5, 0, 0))
    assert explained == pytest.approx(1)


def test_ranks_with_less_work_wait_in_the_all_to_all() -> None:
    even, uneven = [work(2), work(2)], [work(1), work(3)]
    alone = predict(even, COSTS)
    assert predict([work(2)], COSTS) == alone
    most = predict([work(3)], COSTS)
    assert predict(uneven, COSTS).total == pytest.approx(most.total)


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


REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: {folder}/table, generate: {{rows: 512, row_group_rows: 64}}}}
converter: {{use: recd.ikjt}}
pooling:
  - {{use: recd.mean, features: ["seq_*"]}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 100}}}}
model: {{embedding_dim: 8, num_embeddings: 100, bottom_mlp: [8], top_mlp: [8]}}
training: {{batch_size: 16, ranks: 2}}
"""


def test_a_calibration_run(tmp_path: Path) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY.format(folder=tmp_path), encoding="utf-8")
    registry = load_registry(path)
    registry.dataset.prepare()
    start = this_machine(2).least_costs
    found = calibrate(registry, Job(path), start, rounds=1)
    assert [(p.side, p.batch_size, p.fitted) for p in found.points] == [
        ("baseline", 4, True),
        ("baseline", 8, False),
        ("baseline", 16, True),
        ("plugins", 4, True),
        ("plugins", 8, False),
        ("plugins", 16, True),
    ]
    assert all(len(p.works) == len(p.ranks) == 2 for p in found.points)
    assert found.worst_factor >= 1
    assert found.costs.other != start.other
    assert found.costs.all_to_all.bytes_across_nodes == start.all_to_all.bytes_across_nodes
    report = found.as_json()
    assert StageCosts.model_validate(report["costs"]) == found.costs
    assert found.table().row_count == len(STAGES)


@pytest.mark.parametrize("ranks", [3, 7, 24, 1024])
def test_ranks_with_equal_work_wait_for_none(ranks: int) -> None:
    assert predict([Work(element_bytes=0.1)] * ranks, COSTS).all_to_all == 0.0
