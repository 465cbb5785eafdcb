"""What ranks run on hot batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from recd_plugin_scars.runtime.kernel import cache_traffic
from recd_plugin_scars.runtime.stores import RowMover
from recd_plugins import load_registry
from recd_plugins.training.assembly import assemble
from recd_plugins.training.result import GroupCount

#: Of a step: the group of all ranks' batches or "", calls of the mover, and bytes that moved.
Step = tuple[str, int, int]


def count_moves(rank: int, world_size: int, path: Path) -> list[Step]:
    """Train step by step, and see what this rank's backing stores are asked for."""
    registry = load_registry(path)
    parts = assemble(registry, "plugins", torch.device("cpu"))
    calls: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(RowMover, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return patch.object(RowMover, name, call)

    found: list[Step] = []
    before = 0
    with counted("read"), counted("write"):
        for batch in parts.prepared.dataloader(rank, world_size):
            calls.clear()
            loss, _ = parts.dmp(batch)
            loss.backward()
            parts.optimizer.step()
            traffic = cache_traffic(parts.dmp).values()
            moved = sum(table.bytes_read + table.bytes_written for table in traffic)
            found.append((_group_of_all(batch.groups), len(calls), moved - before))
            before = moved
    return found


def _group_of_all(groups: Mapping[str, int]) -> str:
    counted = GroupCount()
    counted.add(groups)
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, next(counted.steps))
    return everyone[0] if len(set(everyone)) == 1 else ""
