"""What the limited processes do: train one table that is larger than their memory."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from recd_plugin_scars.benchmarks.memory_limit import MemoryLimit
from recd_plugin_scars.benchmarks.model import ClickModel, HostEmbeddings
from recd_plugin_scars.benchmarks.trainers import Job, Side, Trained, train_host, train_sharded
from recd_plugins.api.commands import silence_upstream

_CPU = torch.device("cpu")


def train_file_store(job: Job, limit: MemoryLimit) -> Trained:
    """Train our file store."""
    silence_upstream()
    # Private to neither, but torch.distributed does not list it (torch 2.11 to 2.14).
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    trained = train_sharded(job, Side("cache", lookahead=True), limit.set)
    gc.collect()
    dist.destroy_process_group()
    return trained


def train_mapped(job: Job, limit: MemoryLimit, file: Path, random: bool) -> Trained:
    """Train FBGEMM's stock table, whose weights are a shared mapping of a file.

    Args:
        job: what is trained; the hottest rows are read in before.
        limit: of memory.
        file: to be made.
        random: tell the system that pages are read at random (MADV_RANDOM).
    """
    (rows,), dim = job.shape.rows, job.shape.embedding_dim
    with file.open("w+b") as opened:
        opened.truncate(4 * rows * dim)
        mapping = mmap.mmap(opened.fileno(), 0)
    weights = torch.frombuffer(mapping, dtype=torch.float32)
    embeddings = HostEmbeddings(job.shape, _CPU, weights)
    embeddings.initialise()
    limit.set()
    mapping.madvise(mmap.MADV_RANDOM)
    _read_in(weights.view(rows, dim), job, limit.num_bytes)
    if not random:
        mapping.madvise(mmap.MADV_NORMAL)
    trained = train_host(job, ClickModel(job.shape, embeddings, _CPU))
    file.unlink()
    return trained


def _read_in(weights: Tensor, job: Job, memory: int) -> None:
    """Warm up: the pages of the hottest rows, as many as there is memory for, hottest last."""
    (hot,) = job.hot_rows.values()
    weights[torch.from_numpy(hot[: memory // mmap.PAGESIZE][::-1].copy()), 0].sum()
