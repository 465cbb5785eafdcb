"""Training of rm1, rm2 and rm3 in the steps of the paper's ablation (section 6, figures 8 and 9).

Of one model, every rank holds all trainers at once, from the same weights, and they step in turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recd_plugins.api import RecdError, SetupError
from recd_plugins.testing.benchmark import Findings, Size

SUMMARY = "trainer throughput of rm1, rm2 and rm3, from stock TorchRec to deduplicated, by step"
HELP = {
    "device": "Where the models train.",
    "only": "One model: rm1, rm2 or rm3.",
}

MODELS = ("rm1", "rm2", "rm3")
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class _Run:
    """How much is measured.

    Attributes:
        scale: of the models.
        batch_size: rows in a batch of one rank.
        batches: of a rank.
        sparse: features that are read; all without it.
    """

    scale: float
    batch_size: int
    batches: int
    turns: int
    steps: int
    profiled: int
    sparse: tuple[str, ...] = ()


_FEW = ("seq_0_0", "seq_0_1", "usr_0", "item_0")
_RUNS: dict[tuple[Device, Size], _Run] = {
    ("cpu", "tiny"): _Run(0.125, 64, 6, turns=2, steps=1, profiled=1, sparse=_FEW),
    ("cpu", "small"): _Run(0.125, 256, batches=3, turns=3, steps=1, profiled=1),
    ("cpu", "reference"): _Run(0.125, 512, batches=6, turns=7, steps=1, profiled=3),
    ("cuda", "tiny"): _Run(0.125, 64, 6, turns=2, steps=1, profiled=1, sparse=_FEW),
    ("cuda", "small"): _Run(0.125, 1024, batches=6, turns=3, steps=4, profiled=2),
    ("cuda", "reference"): _Run(0.25, 2048, batches=6, turns=9, steps=8, profiled=3),
}


def workload(size: Size, *, device: Device = "cpu", only: str | None = None) -> str:
    """The input in words."""
    run = _RUNS[device, size]
    return (
        f"{', '.join(_models(size, only))} at scale {run.scale:g}, "
        f"{_ranks(device)} rank(s) on {device}, "
        f"batch {run.batch_size} each; readers are another tier: {run.batches} batches a rank are "
        "read, converted and lowered beforehand and go round, for all trainers alike; freed memory "
        "used again; "
        f"{run.turns} turns of 1 step that warms up and {run.steps} timed"
    )


def run(size: Size, *, device: Device = "cpu", only: str | None = None) -> Findings:
    """All trainers of one model after the other's."""
    # Imported here: `recd bench` reads this module for its summary.
    from recd_plugin_recd.benchmarks.trainer_ablation.figures import Ablation

    ablations = [
        Ablation(model, _measure(model, _RUNS[device, size], size, device))
        for model in _models(size, only)
    ]
    return Findings(
        figures=[figure for each in ablations for figure in each.figures()],
        details=[d for each in ablations for d in (each.time_table(), each.work_table())],
        notes=[note for each in ablations for note in each.notes()],
    )


def plot(result: dict[str, Any], folder: Path) -> list[Path]:
    """The paper's figures 8 and 9 from a report."""
    from recd_plugin_recd.benchmarks.trainer_ablation.plots import draw

    return draw(result, folder)


def _measure(model: Any, run: _Run, size: Size, device: Device) -> Any:
    from recd_plugin_recd.benchmarks.trainer_ablation.ranks import Job, measure
    from recd_plugin_recd.benchmarks.trainer_ablation.variants import variants
    from recd_plugin_recd.models.registry_text import rm_registry
    from recd_plugins.api.distributed import backend_for, launch
    from recd_plugins.api.registry import load_registry

    ranks = _ranks(device)
    with tempfile.TemporaryDirectory() as folder:
        registries = {}
        for layout in ("stream", "clustered"):
            registries[layout] = Path(folder) / f"{layout}.yaml"
            text = rm_registry(
                model,
                folder=Path(folder),
                # Two batches at least of the largest ones.
                rows=max(run.batches, 6) * run.batch_size * ranks,
                scale=run.scale,
                layout=layout,
                batch_size=run.batch_size,
                ranks=ranks,
            )
            if run.sparse:
                sparse = f"    sparse: [{', '.join(run.sparse)}]\n"
                text = text.replace("    generate: ", f"{sparse}    generate: ", 1)
            registries[layout].write_text(text, encoding="utf-8")
            load_registry(registries[layout]).dataset.prepare()
        job = Job(
            registries, variants(size), run.batches, run.turns, run.steps, run.profiled, device
        )
        return launch(measure, ranks, job, backend=backend_for(device))[0]


def _models(size: Size, only: str | None) -> Sequence[str]:
    if only is not None and only not in MODELS:
        raise RecdError(f"--only {only}: the models are {', '.join(MODELS)}")
    if only is None:
        return MODELS[:1] if size == "tiny" else MODELS
    return (only,)


def _ranks(device: Device) -> int:
    """One rank a device, two at most."""
    if device == "cpu":
        return 2
    import torch

    from recd_plugins.api.training import fbgemm_has_cuda

    if not torch.cuda.is_available():
        raise SetupError("--device cuda: torch finds no CUDA device; cpu runs without one")
    if not fbgemm_has_cuda():
        raise SetupError(
            "--device cuda: FBGEMM is the CPU build; `recd doctor` says how to get the other"
        )
    return min(2, torch.cuda.device_count())
