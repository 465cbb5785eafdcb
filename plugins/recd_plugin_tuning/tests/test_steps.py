"""What steps cost: fitted to points, and a run that measures them."""

from __future__ import annotations

from pathlib import Path

import pytest

from recd_plugin_tuning.steps import CalibrationPoint, calibrate, fit, works_of
from recd_plugins.api import (
    Job,
    RecdError,
    StepCost,
    load_registry,
    sessions,
    stage_costs,
    step_costs,
    study,
    topologies,
)
from recd_plugins.planning.step_cost import NO_COMPUTE

COSTS = stage_costs.StageCosts.model_validate(
    {
        "lookup": {"steps": 1e-3, "bytes_looked_up": 2e-9},
        "gemm": {"matmul_flops": 1e-10},
        "all_to_all": {"collectives": 1e-4, "bytes_in_node": 1e-9},
        "other": {"steps": 2e-3, "element_bytes": 1e-10, "operators": 1e-8},
    }
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


def point(one: StepCost) -> CalibrationPoint:
    return CalibrationPoint(
        "plugins", 1, [one, one], [step_costs.predict_stages([one], COSTS)] * 2, fitted=True
    )


def test_costs_are_found_again() -> None:
    points = [point(work(1)), point(work(4)), point(work(2, collectives=12)), point(work(9))]
    found = fit(
        points, stage_costs.StageCosts.model_validate({"all_to_all": {"bytes_across_nodes": 7.0}})
    )
    new = [work(3, collectives=8)]
    for stage in stage_costs.STAGES:
        assert getattr(step_costs.predict_stages(new, found), stage) == pytest.approx(
            getattr(step_costs.predict_stages(new, COSTS), stage), rel=1e-3, abs=1e-9
        )
    assert found.all_to_all.bytes_across_nodes == 7.0  # there was no such work
    assert all(
        value >= 0
        for stage in stage_costs.STAGES
        for value in getattr(found, stage).__dict__.values()
    )


def test_less_time_for_more_work_costs_nothing() -> None:
    few, many = (
        CalibrationPoint(
            "plugins",
            1,
            [work(scale)],
            [stage_costs.StageTimes(0.1, seconds, 0, 0, 0)],
            fitted=True,
        )
        for scale, seconds in ((1, 2.0), (4, 1.0))
    )
    gemm = fit([few, many], stage_costs.StageCosts()).gemm
    assert gemm.matmul_flops == 0 < gemm.steps


def test_what_ranks_wait_in_turns_is_a_cost_and_what_work_explains_is_not() -> None:
    def cost(*ranks: stage_costs.StageTimes) -> float:
        one = CalibrationPoint("plugins", 1, [work(1), work(1)], list(ranks), fitted=True)
        return step_costs.predict_stages([work(1)], fit([one], stage_costs.StageCosts())).all_to_all

    in_turns = cost(stage_costs.StageTimes(0, 5, 1, 0, 0), stage_costs.StageTimes(0, 5, 3, 0, 0))
    assert in_turns == pytest.approx(2)
    explained = cost(stage_costs.StageTimes(0, 7, 1, 0, 0), stage_costs.StageTimes(0, 3, 5, 0, 0))
    assert explained == pytest.approx(1)


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


def on_two_nodes(folder: Path) -> Path:
    """A registry that is trained on two nodes, whose topology was measured."""
    cluster = topologies.this_machine(1, nodes=2).model_copy(
        update={"costs": stage_costs.StageCosts()}
    )
    sessions.write_topology(folder / "cluster.yaml", cluster, "Measured.")
    path = folder / "registry.yaml"
    named = f"ranks: 2, ranks_per_node: 1, topology: {folder}/cluster.yaml"
    text = REGISTRY.format(folder=folder).replace("ranks: 2", named)
    path.write_text(text, encoding="utf-8")
    return path


def test_batches_are_of_whole_numbers_of_rows_that_are_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, ...]] = []

    def stop(_: object, __: int, ___: Job, sizes: tuple[int, ...], *____: object, **_____: object):
        found.append(sizes)
        raise RecdError("stop")

    monkeypatch.setattr("recd_plugin_tuning.steps.launch", stop)
    wrap = "wrap: [{use: ranking.negatives, options: {item: item_0, negatives: 4}}]"
    text = on_two_nodes(tmp_path).read_text().replace("converter:", f"  {wrap}\nconverter:")
    path = tmp_path / "wrapped.yaml"
    path.write_text(text.replace("batch_size: 16", "batch_size: 30"))
    with pytest.raises(RecdError, match="stop"):
        calibrate(load_registry(path), Job(path), topologies.this_machine(2))
    assert found == [(5, 15, 30)]


def test_a_calibration_run(tmp_path: Path) -> None:
    path = on_two_nodes(tmp_path)
    registry = load_registry(path).with_training({"ranks_per_node": None})
    registry.dataset.prepare()
    machine = topologies.this_machine(2)
    start = machine.least_costs
    job = Job(path, overrides={"ranks_per_node": None, "topology": None})
    # The registry has its topology yet: what is reckoned is reckoned for these ranks.
    found = calibrate(registry, job, machine, rounds=1)
    assert [(p.variant, p.batch_size, p.fitted) for p in found.points] == [
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
    assert stage_costs.StageCosts.model_validate(report["costs"]) == found.costs
    assert found.table().row_count == len(stage_costs.STAGES)


def test_costs_are_of_the_bytes_that_the_wire_sends(tmp_path: Path) -> None:
    path = tmp_path / "registry.yaml"
    by_rows = "sharding: [{use: torchrec.row_wise, tables: ['*']}]\n"
    path.write_text(REGISTRY.format(folder=tmp_path) + by_rows, encoding="utf-8")
    registry = load_registry(path)
    registry.dataset.prepare()
    spec = topologies.this_machine(2)

    def sent(wire: str) -> float:
        candidate = study.with_plugins(registry.with_training({"wire": wire}), spec)
        plan = candidate.plan(spec.to_torchrec(), 16).sharding
        works = works_of(candidate, plan, NO_COMPUTE, 16, ranks=2, device_type="cpu")
        return sum(work.bytes_in_node for work in works)

    assert sent("bf16") < 0.8 * sent("fp32")
