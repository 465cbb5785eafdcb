"""Two ranks fed by four readers on Ray, one of which is killed every ten seconds."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from recd_plugin_dsi.benchmarks.setup import BATCH, PLUGINS, write_registry
from recd_plugins.api.distributed import launch
from recd_plugins.api.ingestion import build_dataloader
from recd_plugins.api.registry import load_registry

SECONDS_BETWEEN_KILLS = 10.0
# Processes that touched their file in so many seconds read.
_RECENT = 2.0


@dataclass(frozen=True)
class Killed:
    """One epoch: rows that no rank got, rows too many, readers killed, and seconds."""

    lost: int
    repeated: int
    kills: int
    seconds: float


def epoch_with_kills(folder: Path, batches: int, seconds: float) -> Killed:
    """Read every row once, ``seconds`` of waiting a batch."""
    seen = folder / "seen"
    seen.mkdir()
    path = write_registry(
        folder,
        "killed",
        batches,
        seconds=seconds,
        seen=seen,
        ray="readers: 2, cpus_per_reader: 0.1",
    )
    done = threading.Event()
    kills: list[int] = []
    thread = threading.Thread(target=_kill, args=(seen, done, kills))
    thread.start()
    start = time.perf_counter()
    try:
        ranks = launch(_rows, 2, path, threads=1)
    finally:
        done.set()
        thread.join()
    counts = Counter(row for rows in ranks for row in rows)
    lost = batches * BATCH - len(counts)
    return Killed(lost, counts.total() - len(counts), len(kills), time.perf_counter() - start)


def _rows(rank: int, world_size: int, path: Path) -> list[int]:
    registry = load_registry(path, plugins_dir=PLUGINS)
    found: list[int] = []
    with build_dataloader(registry, rank=rank, world_size=world_size) as loader:
        for batch in loader:
            assert batch.sparse_features is not None, "the table has a sparse feature"
            found += batch.sparse_features.values().tolist()
    return found


def _kill(seen: Path, done: threading.Event, kills: list[int]) -> None:
    """One process that reads, every ten seconds from the first batch on."""
    while not any(seen.iterdir()):
        if done.wait(0.1):
            return
    while not done.wait(SECONDS_BETWEEN_KILLS):
        now = time.time()
        files = sorted(seen.iterdir(), key=lambda file: file.stat().st_mtime)
        reading = [int(file.name) for file in files if now - file.stat().st_mtime < _RECENT]
        if reading:
            chosen = reading[len(kills) % len(reading)]
            os.kill(chosen, signal.SIGKILL)
            kills.append(chosen)
