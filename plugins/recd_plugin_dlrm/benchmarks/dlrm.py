"""The DLRM paper's section 5.2: a step by the demo's trainer and by plain torch, by operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recd_plugins.api import RecdError, SetupError
from recd_plugins.testing.benchmark import Detail, Figure, Findings, Size, largest

if TYPE_CHECKING:
    from recd_plugin_dlrm.benchmarks.dlrm_operators.measure import Job, Measured

SUMMARY = "a step of the DLRM paper's section 5.2, and of a DCN, against plain EmbeddingBags"
HELP = {
    "device": "Where both programs train.",
    "only": "One architecture: dlrm or dcn.",
}

ARCHITECTURES = ("dlrm", "dcn")
Device = Literal["cpu", "cuda"]
# Caffe2 on a CPU of 2019: 256 s for 1000 batches; 62 s on a GPU.
_PAPER_MS: dict[Device, float] = {"cpu": 256, "cuda": 62}
_LOSS_GOAL = 1e-6


def workload(size: Size, *, device: Device = "cpu", only: str | None = None) -> str:
    """The input in words."""
    job = _job(size, "dlrm", device)
    return (
        f"{', '.join(_architectures(only))}: 8 tables of {job.configuration.rows:,} rows x 64, "
        f"512 dense features, batch {job.configuration.batch_size}, 1 to "
        f"{job.configuration.max_lookups} uniform ids a lookup, SGD, one rank on {device}; "
        f"{job.batches} batches made beforehand go round; {job.turns} turns of {job.steps} steps"
    )


def run(size: Size, *, device: Device = "cpu", only: str | None = None) -> Findings:
    """Both programs of each architecture."""
    from recd_plugin_dlrm.benchmarks.dlrm_operators.measure import measure
    from recd_plugins.api.distributed import backend_for, launch

    _check(device)
    figures: list[Figure] = []
    details: list[Detail] = []
    for architecture in _architectures(only):
        job = _job(size, architecture, device)
        found = launch(measure, 1, job, backend=backend_for(device))[0]
        figures += _figures(architecture, found, _PAPER_MS[device] if size == "reference" else None)
        details.append(_detail(architecture, found))
    return Findings(figures, details, [])


def plot(result: dict[str, Any], folder: Path) -> list[Path]:
    """The paper's figure 6 from a report: time by operator, both programs."""
    from recd_plugin_dlrm.benchmarks.dlrm_operators.plots import draw

    return draw(result, folder)


def _figures(name: str, found: dict[str, Measured], paper_ms: float | None) -> Iterator[Figure]:
    ours, plain = found["ours"], found["plain"]
    yield Figure.of(
        f"{name}_samples_per_second_over_plain",
        _ratios(plain.seconds, ours.seconds),
        unit="ratio",
        better="higher",
        goal=1,
    )
    yield Figure.of(
        f"{name}_processor_time_over_plain",
        _ratios(ours.processor_seconds, plain.processor_seconds),
        unit="ratio",
        better="lower",
        goal=1,
    )
    for side, measured in found.items():
        yield Figure.of(
            f"{name}_{side}_ms_a_step",
            [1e3 * seconds for seconds in measured.seconds],
            unit="ms",
            better="lower",
            paper=paper_ms if name == "dlrm" else None,
        )
    pairs = zip(ours.losses, plain.losses, strict=True)
    yield Figure.of(
        f"{name}_loss_max_rel_diff",
        [largest(abs(one - other) / other for one, other in pairs)],
        unit="ratio",
        better="lower",
        goal=_LOSS_GOAL,
    )


def _ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """By turn."""
    return [one / other for one, other in zip(over, under, strict=True)]


def _detail(name: str, found: dict[str, Measured]) -> Detail:
    """The paper's figure 6 in numbers."""
    from recd_plugin_dlrm.benchmarks.dlrm_operators.measure import mean_parts
    from recd_plugin_dlrm.benchmarks.dlrm_operators.parts import PARTS

    rows: list[list[str | float]] = []
    for side, measured in found.items():
        parts = mean_parts(measured)
        rows.append([side, *(1e3 * parts[part] for part in PARTS), 1e3 * sum(parts.values())])
    return Detail(f"{name}: ms of a profiled step", ["", *PARTS, "step"], rows)


def _job(size: Size, architecture: Any, device: Device) -> Job:
    from recd_plugin_dlrm.benchmarks.dlrm_operators.configuration import Configuration
    from recd_plugin_dlrm.benchmarks.dlrm_operators.measure import Job

    if size == "tiny":
        tiny = Configuration(rows=50, batch_size=16, max_lookups=5)
        return Job(tiny, architecture, batches=3, turns=3, steps=2, profiled=1, device=device)
    if size == "small":
        small = Configuration(rows=100_000, batch_size=512)
        return Job(small, architecture, batches=4, turns=5, steps=3, profiled=2, device=device)
    paper = Configuration()
    return Job(paper, architecture, batches=8, turns=11, steps=4, profiled=5, device=device)


def _architectures(only: str | None) -> Sequence[str]:
    if only is not None and only not in ARCHITECTURES:
        raise RecdError(f"--only {only}: the architectures are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES if only is None else (only,)


def _check(device: Device) -> None:
    if device == "cpu":
        return
    import torch

    from recd_plugins.api.training import fbgemm_has_cuda

    if not torch.cuda.is_available():
        raise SetupError("--device cuda: torch finds no CUDA device; cpu runs without one")
    if not fbgemm_has_cuda():
        raise SetupError(
            "--device cuda: FBGEMM is the CPU build; `recd doctor` says how to get the other"
        )
