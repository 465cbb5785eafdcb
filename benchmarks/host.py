"""Host cost of a GPU training step: operators, kernel launches, syncs and copies.

With ``--device fake-cuda``, CUDA code runs on a fake device that computes on the CPU, so the counts
repeat exactly on any machine. Kernels per FBGEMM lookup, attention and sort are fixed assumptions.
A sync is a wait of the host for the device. ``--device cuda`` reads the profiler's counts on a GPU.
Each variant runs in its own processes; ``--only demo_dedup`` runs one in about 30 seconds.
"""

from __future__ import annotations

import cProfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import click
import torch
import torch.distributed as dist

from benchmarks._measure import Detail, Figure, Findings, Size, check_device, lower
from recd_plugins.runtime.launch import backend_for, launch

HostDevice = Literal["fake-cuda", "cpu", "cuda"]


@dataclass(frozen=True)
class _Variant:
    """One model and its sharding."""

    model: Literal["demo", "scars", "rm1"] = "demo"
    side: Literal["plugins", "baseline"] = "plugins"
    ranks: int = 1
    sharding: str = "{use: torchrec.planner, tables: ['*']}"
    own_sharders: bool = False
    coalesced: bool = False


#: Variants and the figures that a report has of them.
_VARIANTS: Mapping[str, tuple[_Variant, tuple[str, ...]]] = {
    "demo_dedup": (_Variant(), ("launches", "dispatched", "syncs")),
    "demo_coalesced": (
        _Variant(sharding="{use: torchrec.table_wise, tables: ['*'], options: {coalesce: true}}"),
        ("launches", "syncs"),
    ),
    "two_ranks": (_Variant(ranks=2), ("launches", "syncs")),
    "two_tier": (
        _Variant(ranks=2, sharding="{use: flexshard.two_tier, tables: ['t_seq_*']}"),
        ("launches", "syncs", "backward_syncs"),
    ),
    "scars_cached": (_Variant("scars"), ("launches", "syncs")),
    "scars_coalesced": (_Variant("scars", coalesced=True), ("launches", "syncs")),
    "rm1": (_Variant("rm1"), ("dispatched",)),
    "plain": (_Variant(side="baseline", own_sharders=True), ()),
    "stock": (_Variant(side="baseline"), ()),
}
_TINY = ("demo_dedup", "scars_cached")
OPTIONS = [
    click.Option(["--only"], type=click.Choice(list(_VARIANTS)), help="Count only this variant."),
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
_COLUMNS = (
    *("copy batch", "input dist", "prefetch", "forward", "backward", "optimizer", "other", "all"),
)
_KINDS = {"launches": "launch", "dispatched": "dispatched", "syncs": "sync", "copies": "copy"}
_REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: {folder}/papercal, generate: {{rows: 8192}}}}
converter: {{use: recd.ikjt, options: {{groups: auto, min_dedupe_factor: 1.5}}}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 100000}}}}
pooling:
  - {{use: recd.attention, features: ["seq_*"], options: {{heads: 2}}}}
sharding: [{sharding}]
model:
  embedding_dim: 16
  num_embeddings: 100000
  bottom_mlp: [64]
  top_mlp: [128, 64]
  bag_pooling: mean
training:
  batch_size: {batch_size}
  ranks: {ranks}
  optimizer: rowwise_adagrad
  learning_rate: 0.1
  dense_learning_rate: 0.01
  eps: 1.0e-3
"""


@dataclass
class Counted:
    """Counts of a mean step on rank 0.

    Attributes:
        by_phase: count per phase, for ``launches``, ``dispatched``, ``syncs`` and ``copies``.
        places: lines of kind, count, phase, operator, place and stream, most frequent first.
        calls: Python calls; only on the CPU.
        losses: loss of every step.
    """

    by_phase: dict[str, dict[str, float]] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    calls: float = 0
    losses: list[float] = field(default_factory=list)


def run(
    size: Size, device: HostDevice = "fake-cuda", only: str | None = None, places: bool = False
) -> Findings:
    """Count the events of all variants."""
    if device == "cuda":
        check_device("cuda")
    names = [only] if only else list(_TINY if size == "tiny" else _VARIANTS)
    batch_size = 64 if size == "tiny" else 512
    with tempfile.TemporaryDirectory() as folder:

        def count(name: str, device: HostDevice) -> Counted:
            variant, _ = _VARIANTS[name]
            job = variant, device, folder, batch_size
            backend = backend_for(device) if device == "cuda" else "gloo"
            return launch(count_variant, variant.ranks, *job, backend=backend, threads=1)[0]

        counted = {name: count(name, device) for name in names}
        if {"plain", "stock"} <= set(names) and device != "cpu":
            for name in ("plain", "stock"):
                counted[name].calls = count(name, "cpu").calls
    details = []
    for what in _KINDS:
        rows: list[list[str | float]] = [
            [name, *(each.by_phase[what].get(phase, 0.0) for phase in _COLUMNS)]
            for name, each in counted.items()
        ]
        details.append(Detail(f"{what} per step", ["", *_COLUMNS], rows))
    notes = [line for each in counted.values() for line in each.places] if places else []
    workload = f"{device}, batch {batch_size} per rank, mean of {_STEPS} steps on rank 0"
    return Findings(workload, _figures(counted), details, notes)


def _figures(counted: Mapping[str, Counted]) -> list[Figure]:
    figures = []
    for name, each in counted.items():
        for what in _VARIANTS[name][1]:
            kind, phase = ("syncs", "backward") if what == "backward_syncs" else (what, "all")
            value = each.by_phase[kind].get(phase, 0.0)
            figures.append(lower(f"{name}_{what}", value, f"{kind} per step"))
    if {"plain", "stock"} <= set(counted):
        for what in ("launches", "syncs"):
            of = [max(counted[name].by_phase[what]["all"], 1) for name in ("plain", "stock")]
            figures.append(lower(f"plain_over_stock_{what}", of[0] / of[1]))
        calls = counted["plain"].calls / counted["stock"].calls
        figures.append(lower("plain_over_stock_calls", calls))
    return figures


def count_variant(
    rank: int, world_size: int, variant: _Variant, device: HostDevice, folder: str, batch_size: int
) -> Counted:
    """Train a variant on this rank and count one step per batch. Collective."""
    from recd_plugins.runtime.imports import silence_upstream
    from recd_plugins.testing.fake_cuda import mark_phases

    silence_upstream()
    with _entered(device, rank) as torch_device:
        make = _scars if variant.model == "scars" else _from_registry
        pipeline, optimizer, batches = make(variant, torch_device, folder, batch_size)
        found = Counted()
        around = cycle(batches)

        def step() -> None:
            loss = pipeline.progress(around)[0]
            losses.append(loss.detach())

        losses: list[torch.Tensor] = []
        for _ in range(_STEPS):
            step()
        mark_phases(pipeline, _PHASES)
        mark_phases(optimizer, dict.fromkeys(("step", "zero_grad"), "optimizer"))
        counters = {"fake-cuda": _count_fake, "cpu": _count_cpu, "cuda": _count_profiled}
        counters[device](step, found)
        found.losses = [float(loss) for loss in losses]
        dist.barrier()
        return found


@contextmanager
def _entered(device: HostDevice, rank: int) -> Iterator[torch.device]:
    from recd_plugins.testing.fake_cuda import fake_cuda

    real = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    with fake_cuda(rank) if device == "fake-cuda" else nullcontext(real) as entered:
        yield entered


def _from_registry(variant: _Variant, device: torch.device, folder: str, batch_size: int) -> Any:
    from benchmarks.ablation import DEDUP
    from recd_plugin_recd.models import rm_registry
    from recd_plugins.api import ExactEmbeddingBagCollectionSharder, ExactEmbeddingCollectionSharder
    from recd_plugins.config.from_file import load_registry
    from recd_plugins.sharding.sharders import fused_params
    from recd_plugins.training.sharded_model import build_sharded_model

    text = _REGISTRY.format(
        folder=folder, sharding=variant.sharding, batch_size=batch_size, ranks=variant.ranks
    )
    if variant.model == "rm1":
        text = rm_registry(
            "rm1",
            folder=Path(folder),
            rows=8 * batch_size,
            scale=0.125,
            layout="clustered",
            batch_size=batch_size,
            ranks=1,
        )
    registry = load_registry(Path(folder, "registry.yaml"), text=text)
    if variant.model == "rm1":
        registry = DEDUP.apply(registry)
    if dist.get_rank() == 0:
        registry.dataset.prepare()
    dist.barrier()
    sharders: Any = None
    if variant.own_sharders:
        params = fused_params(registry.training)
        own = ExactEmbeddingBagCollectionSharder, ExactEmbeddingCollectionSharder
        sharders = [sharder(dict(params)) for sharder in own]
    parts = build_sharded_model(registry, variant.side, device, sharders=sharders)
    loader = parts.prepared.dataloader(
        rank=dist.get_rank(), world_size=dist.get_world_size(), device=device
    )
    batches = list(islice(loader, _STEPS))
    parts.dmp.train()
    pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, device)
    return pipeline, parts.optimizer, batches


def _scars(variant: _Variant, device: torch.device, folder: str, batch_size: int) -> Any:
    from benchmarks import _scars_ranks as ranks
    from benchmarks.scars import _job
    from recd_plugins.data.loader import pinned
    from recd_plugins.sharding.pipeline import build_train_pipeline
    from recd_plugins.training.optimizer import build_optimizer

    kind: Any = device.type
    job, _ = _job(64, batch_size // 4, _STEPS, 1, kind, (512, 256), (512, 512, 256))
    side = ranks.Variant("cache", coalesced=variant.coalesced, lookahead=True)
    dmp = ranks._sharded_model(job, side, device)
    optimizer = build_optimizer(dmp, ranks.TRAINING)
    batches = list(ranks._batches(job))
    if kind == "cuda":
        batches = [pinned(batch) for batch in batches]
    return build_train_pipeline(dmp, optimizer, device), optimizer, batches


def _count_fake(step: Callable[[], None], found: Counted) -> None:
    from recd_plugins.testing.fake_cuda import host_counts

    with host_counts() as counts:
        for _ in range(_STEPS):
            step()
    _fill(found, counts)


def _fill(found: Counted, counts: Any) -> None:
    found.by_phase = {what: counts.by_phase(kind, _STEPS) for what, kind in _KINDS.items()}
    found.places = [
        f"{e.what:7}{times / _STEPS:7g}  {e.phase:11} {e.kind} | {e.place} | {e.stream}"
        for e, times in sorted(counts.items(), key=lambda each: (each[0].what, -each[1]))
        if e.what != "dispatched"
    ]


def _count_cpu(step: Callable[[], None], found: Counted) -> None:
    """Count operators, and Python calls in further steps."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from recd_plugins.testing.fake_cuda import HostCounts, kernels_of

    counts = HostCounts()

    class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counts.add("dispatched", func._schema.name)
            counts.add("launch", func._schema.name, kernels_of(func))
            return func(*args, **(kwargs or {}))

    with Operators():  # type: ignore[no-untyped-call]
        for _ in range(_STEPS):
            step()
    _fill(found, counts)
    with cProfile.Profile() as profile:
        for _ in range(_STEPS):
            step()
    entries = [each for each in profile.getstats() if not isinstance(each.code, str)]
    found.calls = sum(each.callcount for each in entries) / _STEPS


def _count_profiled(step: Callable[[], None], found: Counted) -> None:
    """Count CUDA's calls with torch.profiler, without phases and places."""
    from torch.profiler import ProfilerActivity, profile

    from recd_plugins.testing.fake_cuda import HostCounts, HostEvent

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            step()
    counts = HostCounts()
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        what = {
            **dict.fromkeys(
                ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel"), "launch"
            ),
            **dict.fromkeys(("cudaGraphLaunch", "cudaMemsetAsync", "cudaMemcpyAsync"), "launch"),
        }.get(name, "sync" if name.startswith("cuda") and name.endswith("Synchronize") else "")
        what = what or ("dispatched" if name.startswith(("aten::", "fbgemm::")) else "")
        if what:
            counts[HostEvent("other", what, name, "", "")] += 1
    _fill(found, counts)
