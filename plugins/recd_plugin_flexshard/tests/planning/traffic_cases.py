"""What the ranks of test_traffic.py do: all batches of a registry, their bytes counted."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime import tier_groups
from recd_plugins import load_registry
from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.sharding.gradient_dedup import all_gradients_sent
from recd_plugins.training.assembly import assemble


@dataclass(frozen=True)
class Seen:
    """Of one rank: bytes by tier and payload, batches, and the lists that their sequences have."""

    sent: Counter[tuple[str, str]]
    steps: int
    lists: int


def all_batches(rank: int, world_size: int, registry: Path, sends_all: bool) -> Seen:
    device = torch.device("cpu")
    with all_gradients_sent() if sends_all else nullcontext():
        parts = assemble(load_registry(registry), "plugins", device)
    loader = parts.prepared.dataloader(rank=rank, world_size=world_size, device=device)
    names = tier_groups().names
    sent: Counter[tuple[str, str]] = Counter()
    steps = lists = 0
    for batch in loader:
        with CollectiveBytes() as counter:
            loss, _ = parts.dmp(batch)
            loss.backward()
        for traffic, num_bytes in counter.sent.items():
            if traffic.group in names:
                sent[names[traffic.group], traffic.payload] += num_bytes
        features: Any = batch.sequence_features
        lists += cast(KeyedJaggedTensor, features).lengths().numel()
        steps += 1
    return Seen(sent, steps, lists)
