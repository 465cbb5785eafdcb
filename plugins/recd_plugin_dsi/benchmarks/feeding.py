"""Trains on what readers make, and measures what each step waits."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median

import torch

from recd_plugin_dsi.benchmarks.setup import PLUGINS
from recd_plugins.api.commands import silence_upstream
from recd_plugins.api.distributed import launch
from recd_plugins.api.ingestion import DataLoader, StallMeter
from recd_plugins.api.registry import Prepared, load_registry
from recd_plugins.api.training import assemble

_WARMUP, _ALONE = 5, 40


@dataclass(frozen=True)
class Fed:
    """One run.

    Attributes:
        alone_seconds: of a step on ready batches, before there were readers and after them.
        seconds: of each step, waiting included.
        waited: seconds of each step.
        readers: at each step.
        said: on stderr.
    """

    alone_seconds: float
    seconds: list[float]
    waited: list[float]
    readers: list[int]
    said: str

    def stall_share(self, steps: int) -> float:
        """The waiting share of the time of the last steps."""
        return sum(self.waited[-steps:]) / sum(self.seconds[-steps:])

    def throughput_of_trainer(self, steps: int) -> float:
        """The throughput of the last steps, over that of the trainer alone."""
        return self.alone_seconds / fmean(self.seconds[-steps:])


def feed(path: Path, steps: int) -> Fed:
    """Train ``steps`` steps of a registry file in a process of its own, with one thread."""
    return launch(_feed, 1, path, steps, threads=1)[0]


def alone(path: Path) -> float:
    """Seconds of a step on ready batches."""
    return launch(_feed, 1, path, 0, threads=1)[0].alone_seconds


def _feed(rank: int, world_size: int, path: Path, steps: int) -> Fed:
    silence_upstream()
    device = torch.device("cpu")
    registry = load_registry(path, plugins_dir=PLUGINS)
    parts = assemble(registry, "plugins", device)
    pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, device)
    with _ready_loader(parts.prepared) as loader:
        ready = cycle(list(islice(loader, 2)))
    parts.dmp.train()
    alone_seconds = _timed(lambda: pipeline.progress(ready))
    said = io.StringIO()
    stalls = StallMeter(device)
    seconds, waited, readers = [], [], []
    if steps:
        # A pipeline has batches of the iterator before in it: its first steps take them.
        with (
            contextlib.redirect_stderr(said),
            parts.prepared.dataloader(rank, world_size) as fed,
            contextlib.closing(stalls.metered(fed)) as batches,
        ):
            for _ in range(_WARMUP):
                pipeline.progress(batches)
            for _ in range(steps):
                start = time.perf_counter()
                pipeline.progress(batches)
                seconds.append(time.perf_counter() - start)
                assert stalls.newest is not None, "a step takes a batch"
                waited.append(stalls.newest.end - stalls.newest.start)
                readers.append(int(fed.report().get("readers", 0)))
        # Once more, as what else the machine does changes.
        alone_seconds = (alone_seconds + _timed(lambda: pipeline.progress(ready))) / 2
    return Fed(alone_seconds, seconds, waited, readers, said.getvalue())


def _ready_loader(prepared: Prepared) -> DataLoader:
    """The rank itself reads, a few batches."""
    own = replace(prepared.registry.with_training({"workers": 0}), ingestion=None)
    return replace(prepared, registry=own).dataloader(rank=0, world_size=1)


def _timed(step: Callable[[], object]) -> float:
    for _ in range(_WARMUP):
        step()
    seconds = []
    for _ in range(_ALONE):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return median(seconds)
