"""What the ranks of test_launch.py do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist

from recd_plugins.runtime.errors import PluginError, Problem, RegistryError
from recd_plugins.runtime.launch import launch


def total(rank: int, world_size: int, start: float) -> torch.Tensor:
    value = torch.tensor(start + rank)
    dist.all_reduce(value)
    return value


def environment(rank: int, world_size: int, names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def threads(rank: int, world_size: int) -> int:
    return torch.get_num_threads()


def raise_on_rank_1(rank: int, world_size: int, kind: str) -> None:
    if rank == 1:
        if kind == "value":
            raise ValueError("the reason")
        if kind == "plugin":
            raise PluginError("acme.rows: the reason")
        if kind == "registry":
            raise RegistryError([Problem("registry.yaml", 3, "cache", "the reason")])
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "abort":
            os.abort()
        if kind == "exit":
            os._exit(3)
    dist.barrier()


def note_pid_and_sleep(rank: int, world_size: int, folder: str) -> None:
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    time.sleep(60)


def launch_sleepers(folder: str) -> None:
    launch(note_pid_and_sleep, 2, folder)


def parents_of_it_and_of_what_it_starts(rank: int, world_size: int) -> tuple[int, int]:
    context = multiprocessing.get_context("forkserver")
    queue = context.SimpleQueue()
    process = context.Process(target=note_parent, args=(queue,))
    process.start()
    parent = queue.get()
    process.join()
    return os.getppid(), parent


def note_parent(queue: SimpleQueue[int]) -> None:
    queue.put(os.getppid())


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()
