"""Host cost of a GPU training step: operators, kernel launches, syncs and copies.

With ``--device fake-cuda``, CUDA code runs on a fake device that computes on the CPU, so the counts
repeat exactly on any machine. Kernels per FBGEMM lookup, attention and sort are fixed assumptions.
A sync is a wait of the host for the device. ``--device cuda`` reads the profiler's counts on a GPU.
Each variant runs in its own processes; ``--only demo_dedup`` runs one in about 30 seconds.
"""

from __future__ import annotations

import cProfile
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import click
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import _scars_ranks
from benchmarks._measure import Detail, Figure, Findings, Size, check_device, lower
from benchmarks._ranks import first_batches
from benchmarks.ablation import DEDUP
from benchmarks.scars import _job
from recd_plugin_recd.models import rm_registry
from recd_plugin_scars.runtime.policies import UVM_POLICIES, CachePolicy
from recd_plugins.api import ExactEmbeddingBagCollectionSharder, ExactEmbeddingCollectionSharder
from recd_plugins.config.from_file import load_registry
from recd_plugins.data.loader import pinned
from recd_plugins.runtime.imports import silence_upstream
from recd_plugins.runtime.launch import backend_for, launch
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.testing.fake_cuda import (
    HostCounts,
    HostEvent,
    fake_cuda,
    host_counts,
    mark_phases,
)
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.sharded_model import Variant as Side
from recd_plugins.training.sharded_model import build_sharded_model

HostDevice = Literal["fake-cuda", "cpu", "cuda"]


@dataclass(frozen=True)
class Variant:
    """One model and its sharding, and the figures to report."""

    figures: str
    model: Literal["demo", "scars", "rm1"] = "demo"
    side: Side = "plugins"
    ranks: int = 1
    sharding: str = "use: torchrec.planner\n    tables: ['*']"
    own_sharders: bool = False
    coalesced: bool = False
    policy: CachePolicy = "lru"


_COALESCE = "use: torchrec.table_wise\n    tables: ['*']\n    options: {coalesce: true}"
_TIERS = "use: flexshard.two_tier\n    tables: ['t_seq_*']"
VARIANTS = {
    "demo_dedup": Variant("launches dispatched syncs"),
    "demo_coalesced": Variant("launches syncs", sharding=_COALESCE),
    "two_ranks": Variant("launches syncs", ranks=2),
    "two_tier": Variant("launches syncs backward_syncs", ranks=2, sharding=_TIERS),
    "scars_cached": Variant("launches syncs", "scars"),
    "scars_coalesced": Variant("launches syncs", "scars", coalesced=True),
    "scars_static": Variant("launches syncs", "scars", policy="static"),
    "rm1": Variant("dispatched", "rm1"),
    "plain": Variant("", side="baseline", own_sharders=True),
    "stock": Variant("", side="baseline"),
}
OPTIONS = [
    click.Option(["--only"], type=click.Choice(list(VARIANTS)), help="Count only this variant."),
    click.Option(
        ["--device"], type=click.Choice(["fake-cuda", "cpu", "cuda"]), default="fake-cuda"
    ),
    click.Option(["--places"], is_flag=True, help="List the source lines of launches and syncs."),
]
_STEPS = 4
_PHASES = {
    "copy_batch_to_gpu": "copy batch",
    "start_sparse_data_dist": "input dist",
    "wait_sparse_data_dist": "input dist",
    "_prefetch": "prefetch",
    "_model_fwd": "forward",
}
_COLUMNS = [*dict.fromkeys(_PHASES.values()), "backward", "optimizer", "other", "all"]
_KINDS = {"launches": "launch", "dispatched": "dispatched", "syncs": "sync", "copies": "copy"}
_DEMO = Path(__file__).parents[1] / "registry.yaml"


@dataclass
class Counted:
    """Counts of a mean step on rank 0, and the loss of every step.

    ``by_phase`` maps each of ``_KINDS`` to counts per phase. ``places`` are lines of kind, count,
    phase, operator, place and stream. ``calls`` are calls of Python functions, only on the CPU.
    """

    by_phase: dict[str, dict[str, float]] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    calls: float = 0
    losses: list[float] = field(default_factory=list)


def run(
    size: Size, device: HostDevice = "fake-cuda", only: str | None = None, places: bool = False
) -> Findings:
    if device == "cuda":
        check_device("cuda")
    names = [only] if only else ["demo_dedup", "scars_cached"] if size == "tiny" else [*VARIANTS]
    batch_size = 64 if size == "tiny" else 512
    with tempfile.TemporaryDirectory() as folder:

        def count(name: str, device: HostDevice) -> Counted:
            job = VARIANTS[name], device, folder, batch_size
            backend = backend_for(device)
            return launch(count_variant, job[0].ranks, *job, backend=backend, threads=1)[0]

        counted = {name: count(name, device) for name in names}
        if "stock" in counted and device != "cpu":
            for name in {"plain", "stock"} & set(counted):
                counted[name].calls = count(name, "cpu").calls
    rows: list[list[str | float]] = [
        [f"{name} {what}", *(each.by_phase[what].get(phase, 0.0) for phase in _COLUMNS)]
        for what in _KINDS
        for name, each in counted.items()
    ]
    notes = [line for each in counted.values() for line in each.places] if places else []
    workload = f"{device}, batch {batch_size} per rank, mean of {_STEPS} steps on rank 0"
    details = [Detail("per step and phase", ["", *_COLUMNS], rows)]
    return Findings(workload, _figures(counted), details, notes)


def _figures(counted: Mapping[str, Counted]) -> list[Figure]:
    figures = []
    for name, each in counted.items():
        for what in VARIANTS[name].figures.split():
            phase, _, kind = what.rpartition("_")
            value = each.by_phase[kind].get(phase or "all", 0.0)
            figures.append(lower(f"{name}_{what}", value, "per step"))
    if {"plain", "stock"} <= set(counted):
        ours, stock = counted["plain"], counted["stock"]
        for what in ("launches", "syncs"):
            over = ours.by_phase[what]["all"] / max(1, stock.by_phase[what]["all"])
            figures.append(lower(f"plain_over_stock_{what}", over))
        figures.append(lower("plain_over_stock_calls", ours.calls / stock.calls))
    return figures


def count_variant(
    rank: int, world_size: int, variant: Variant, device: HostDevice, folder: str, batch_size: int
) -> Counted:
    """Train a variant on this rank and count one step per batch. Collective."""
    silence_upstream()
    real = nullcontext(torch.device(device, rank) if device == "cuda" else torch.device("cpu"))
    with fake_cuda(rank) if device == "fake-cuda" else real as torch_device:
        make = _scars if variant.model == "scars" else _from_registry
        pipeline, optimizer, batches = make(variant, torch_device, folder, batch_size)
        around, losses = cycle(batches), list[torch.Tensor]()

        def steps() -> None:
            for _ in range(_STEPS):
                losses.append(pipeline.progress(around)[0].detach())

        steps()
        mark_phases(pipeline, _PHASES)
        mark_phases(optimizer, dict.fromkeys(("step", "zero_grad"), "optimizer"))
        counters = {"fake-cuda": _on_fake_device, "cpu": _operators, "cuda": _profiled}
        counts = counters[device](steps)
        found = Counted({w: counts.by_phase(kind, _STEPS) for w, kind in _KINDS.items()})
        for e, times in sorted(counts.items(), key=lambda each: (each[0].what, -each[1])):
            if e.what != "dispatched":
                count = f"{e.what:7}{times / _STEPS:7g}"
                found.places.append(f"{count}  {e.phase:11} {e.kind} | {e.place} | {e.stream}")
        if device == "cpu":
            with cProfile.Profile() as calls:
                steps()
            python = [each for each in calls.getstats() if not isinstance(each.code, str)]
            found.calls = sum(each.callcount for each in python) / _STEPS
        found.losses = [float(loss) for loss in losses]
        dist.barrier()
        return found


def _from_registry(variant: Variant, device: torch.device, folder: str, batch_size: int) -> Any:
    """Return pipeline, optimizer and batches of the demo or of rm1."""
    sizes: dict[str, Any] = {"batch_size": batch_size, "ranks": variant.ranks}
    if variant.model == "rm1":
        layout: Any = {"rows": 2 * _STEPS * batch_size, "scale": 0.125, "layout": "clustered"}
        text = rm_registry("rm1", folder=Path(folder), **layout, **sizes)
    else:
        text = _DEMO.read_text(encoding="utf-8").replace("rows: 32768", "rows: 8192")
        text = text.replace(".data/papercal", f"{folder}/papercal")
        text = text.replace('use: auto\n    tables: ["t_*"]', variant.sharding)
    planner = "torchrec.planner" if variant.model == "rm1" else None
    registry = load_registry(Path(folder, "registry.yaml"), text=text, sharding=planner)
    registry = DEDUP.apply(registry).with_training(sizes)  # with small learning rates
    if dist.get_rank() == 0:
        registry.dataset.prepare()
    dist.barrier()
    own = (ExactEmbeddingBagCollectionSharder, ExactEmbeddingCollectionSharder)
    sharders: Any = [sharder(fused_params(registry.training)) for sharder in own]
    parts = build_sharded_model(
        registry, variant.side, device, sharders=sharders if variant.own_sharders else None
    )
    batches = first_batches(parts, device, _STEPS)
    parts.dmp.train()
    pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, device)
    return pipeline, parts.optimizer, batches


def _scars(variant: Variant, device: torch.device, folder: str, batch_size: int) -> Any:
    """Return pipeline, optimizer and batches of the SCARS benchmark."""
    kind: Any = device.type
    job, _ = _job(64, batch_size // 4, _STEPS, 1, kind, (512, 256), (512, 512, 256))
    tables: Any = "uvm" if kind == "cuda" and variant.policy in UVM_POLICIES else "cache"
    side = _scars_ranks.Variant(tables, variant.policy, coalesced=variant.coalesced, lookahead=True)
    dmp = _scars_ranks._sharded_model(job, side, device)
    optimizer = build_optimizer(dmp, _scars_ranks.TRAINING)
    batches = [pinned(b) if kind == "cuda" else b for b in _scars_ranks._batches(job)]
    return build_train_pipeline(dmp, optimizer, device), optimizer, batches


def _on_fake_device(steps: Callable[[], None]) -> HostCounts:
    with host_counts() as counts:
        steps()
    return counts


def _operators(steps: Callable[[], None]) -> HostCounts:
    counts = HostCounts()

    class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts.add("dispatched", func._schema.name)
            return func(*args, **(kwargs or {}))

    with Operators():  # type: ignore[no-untyped-call]
        steps()
    return counts


def _profiled(steps: Callable[[], None]) -> HostCounts:
    """Count operators, then the CUDA calls in torch.profiler, without phases and places."""
    counts = _operators(steps)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        steps()
    assert profiler.profiler is not None, "the profiler ran"
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        copies = name.startswith(("cudaMemcpy", "cudaMemset"))
        if copies or name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch")):
            counts[HostEvent("other", "launch", name, "", "")] += 1
        elif name.startswith("cuda") and name.endswith("Synchronize"):
            counts[HostEvent("other", "sync", name, "", "")] += 1
    return counts
