"""``recd bench dlrm``: both programs are one model, on a few rows."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from recd_plugin_dlrm.benchmarks import dlrm as bench
from recd_plugin_dlrm.benchmarks.dlrm_operators.configuration import (
    FEATURES,
    NUM_DENSE,
    Configuration,
    random_batches,
)
from recd_plugin_dlrm.benchmarks.dlrm_operators.measure import Job, Measured, measure
from recd_plugin_dlrm.benchmarks.dlrm_operators.parts import PARTS, seconds_by_part
from recd_plugins.cli import main
from recd_plugins.distributed.launch import Ranks
from recd_plugins.testing.benchmark import Findings
from recd_plugins.training.profile_events import PROFILED_STEP, Span, StepEvents

TINY = Configuration(rows=50, batch_size=16, max_lookups=5)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Measured]]:
    """By architecture, three batches that go round twice and more."""
    with Ranks(1, threads=1) as ranks:
        return {
            name: ranks.run(measure, Job(TINY, name, 3, turns=3, steps=2, profiled=1))[0]
            for name in ("dlrm", "dcn")
        }


@pytest.fixture(scope="module")
def report(found: dict[str, dict[str, Measured]]) -> dict[str, Any]:
    patched = pytest.MonkeyPatch()
    launched = iter(found.values())
    patched.setattr("recd_plugins.api.distributed.launch", lambda *_, **__: [next(launched)])
    findings = bench.run("small")
    patched.undo()
    assert isinstance(findings, Findings)
    return asdict(findings)


@pytest.mark.parametrize("architecture", ["dlrm", "dcn"])
def test_both_programs_have_the_same_losses(
    found: dict[str, dict[str, Measured]], architecture: str
) -> None:
    ours, plain = (found[architecture][name].losses for name in ("ours", "plain"))
    assert len(ours) == 4 * 2 + 1
    assert ours == pytest.approx(plain, rel=1e-6)
    assert len(set(ours)) == len(ours), "nothing was learned"


def test_architectures_are_different_models(found: dict[str, dict[str, Measured]]) -> None:
    assert found["dlrm"]["ours"].losses != pytest.approx(found["dcn"]["ours"].losses, rel=1e-6)


def test_every_part_of_a_step_is_found(found: dict[str, dict[str, Measured]]) -> None:
    for programs in found.values():
        for name, measured in programs.items():
            (parts,) = measured.parts
            assert list(parts) == list(PARTS)
            assert [part for part in PARTS if parts[part] <= 0] == (
                ["communication"] if name == "plain" else []
            )


def test_figures(report: dict[str, Any]) -> None:
    assert [figure["figure"] for figure in report["figures"]] == [
        f"{name}_{figure}"
        for name in ("dlrm", "dcn")
        for figure in (
            "samples_per_second_over_plain",
            "processor_time_over_plain",
            "ours_ms_a_step",
            "plain_ms_a_step",
            "loss_max_rel_diff",
        )
    ]
    by_name = {figure["figure"]: figure for figure in report["figures"]}
    assert by_name["dcn_loss_max_rel_diff"]["value"] <= 1e-6
    assert by_name["dlrm_samples_per_second_over_plain"]["runs"] == 3
    for detail in report["details"]:
        assert detail["headings"] == ["", *PARTS, "step"]
        assert [row[0] for row in detail["rows"]] == ["ours", "plain"]
        for row in detail["rows"]:
            assert sum(row[1:-1]) == pytest.approx(row[-1])


def test_a_loss_that_is_none_is_seen() -> None:
    """Also behind another that differs."""
    ours = Measured([1.0], [1.0], losses=[0.5, math.nan])
    found = {"ours": ours, "plain": Measured([1.0], [1.0], losses=[0.4, 0.5])}
    with pytest.raises(ValueError, match="dlrm_loss_max_rel_diff: a sample is nan"):
        list(bench._figures("dlrm", found, None))


def test_plot(report: dict[str, Any], tmp_path: Path) -> None:
    (path,) = bench.plot(report, tmp_path)
    text = path.read_text(encoding="utf-8")
    assert all(part in text for part in PARTS)


def test_the_configuration_is_the_papers() -> None:
    configuration = Configuration()
    spec = configuration.spec("dlrm")
    assert (len(FEATURES), spec.num_embeddings, spec.embedding_dim) == (8, 1_000_000, 64)
    assert (NUM_DENSE, spec.bottom_mlp, spec.top_mlp) == (512, [512], [1024, 1024, 1024])
    assert (configuration.batch_size, configuration.max_lookups) == (2048, 100)


def test_batches_are_the_same_every_time_and_within_bounds() -> None:
    first, second = (list(random_batches(TINY, 2)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.dense, other.dense)
    batch = first[0]
    assert batch.dense.shape == (16, NUM_DENSE)
    assert len(batch.lengths) == 16 * len(FEATURES)
    assert (int(batch.lengths.min()), int(batch.lengths.max())) == (1, 5)
    assert int(batch.ids.max()) < 50
    assert not torch.equal(first[0].labels, first[1].labels)


def test_a_moment_belongs_to_the_innermost_part() -> None:
    node = "autograd::engine::evaluate_function: "
    spans = [
        Span("## part: MLPs ##", 10, 40, is_region=True),
        Span("aten::linear", 12, 30, sequence=7),
        Span("aten::embedding_bag", 40, 50, sequence=8),
        Span("## part: interaction ##", 50, 60, is_region=True),
        Span("aten::bmm", 51, 59, sequence=9),
        Span(f"{node}BmmBackward0", 60, 65, sequence=9),
        Span(f"{node}AddmmBackward0", 65, 75, sequence=7),
        Span("aten::mm", 66, 74),
        Span("c10d::allreduce_", 70, 72),
        Span(f"{node}EmbeddingBagBackward0", 75, 85, sequence=8),
        Span("aten::index_select", 76, 80),
        Span("Optimizer.step#SGD.step", 85, 95, is_region=True),
        Span("aten::mm", 0, 100, thread=5),
        Span("aten::mm", 120, 130),
    ]
    events = StepEvents(Span(PROFILED_STEP, 0, 100), host=spans)
    expected = {
        "lookup": 10, "lookup backward": 10, "MLPs": 30 + 8, "interaction": 10 + 5,
        "optimizer": 10, "communication": 2, "other": 15,
    }  # fmt: skip
    found = seconds_by_part(events, on_cuda=False)
    assert found == pytest.approx({part: 1e-9 * spent for part, spent in expected.items()})


def test_on_a_device_kernels_belong_to_the_part_that_launched_them() -> None:
    node = "autograd::engine::evaluate_function: "
    events = StepEvents(
        Span(PROFILED_STEP, 0, 100),
        host=[
            Span("## part: MLPs ##", 1, 5, is_region=True),
            Span("aten::addmm", 2, 3, operator=1, sequence=4),
            Span("aten::embedding_bag", 6, 7, operator=2),
            Span(f"{node}AddmmBackward0", 8, 12, thread=2, sequence=4),
            Span("aten::mm", 9, 10, thread=2, operator=3),
        ],
        kernels=[
            Span("gemm", 10, 30, operator=1),
            Span("embedding", 25, 45, operator=2),
            Span("gemm", 50, 60, operator=3),
            Span("ncclDevKernel_AllReduce", 60, 64),
        ],
    )
    found = seconds_by_part(events, on_cuda=True)
    shown = {part: round(1e9 * seconds) for part, seconds in found.items() if seconds}
    assert shown == {"MLPs": 30, "lookup": 15, "communication": 4, "other": 51}


def test_mistakes_are_told() -> None:
    result = CliRunner().invoke(main, ["bench", "dlrm", "--only", "din"])
    assert result.exit_code == 1
    assert "--only din: the architectures are dlrm, dcn" in result.output
    assert "dlrm" in CliRunner().invoke(main, ["bench"]).output
    if not torch.cuda.is_available():
        result = CliRunner().invoke(main, ["bench", "dlrm", "--device", "cuda"])
        assert "--device cuda: torch finds no CUDA device" in result.output
