"""The choice of rows on several ranks, against counting everything in one place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recd_plugin_flexshard.runtime.retier import Chosen, RecentAccesses, choose_rows


@dataclass(frozen=True)
class Case:
    num_keys: int
    num_hot: int
    num_flex: int
    accesses: int
    skew: float
    steps: int = 3
    # Keys are multiples of it.
    factor: int = 1


def draw(case: Case, rank: int, seed: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """The keys that a rank reads, by step; rank 1 reads none in case there are few accesses."""
    random = np.random.default_rng([seed, rank])
    weights = (1.0 + np.arange(case.num_keys)) ** -case.skew
    count = 0 if rank == 1 and case.accesses < 10 else case.accesses
    return [
        random.choice(case.num_keys, count, p=weights / weights.sum()) * case.factor
        for _ in range(case.steps)
    ]


def current(case: Case, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    keys = np.random.default_rng(seed).permutation(case.num_keys) * case.factor
    return keys[: case.num_hot], keys[case.num_hot : case.num_hot + case.num_flex]


def choose(rank: int, world_size: int, case: Case, seed: int) -> Chosen:
    recent = RecentAccesses(bound=1 << 20)
    for keys in draw(case, rank, seed):
        recent.add(torch.from_numpy(keys))
    group = dist.group.WORLD
    assert group is not None
    assert world_size == group.size()
    chosen = choose_rows(recent.take(), *current(case, seed), group)
    assert len(recent.take()[0]) == 0
    return chosen


def choose_in_one_place(world_size: int, case: Case, seed: int) -> Chosen:
    counts = Counter[int]()
    for rank in range(world_size):
        for keys in draw(case, rank, seed):
            counts.update(keys.tolist())
    hot, flex = (keys.tolist() for keys in current(case, seed))
    place = {**dict.fromkeys(hot, 0), **dict.fromkeys(flex, 1)}
    order = sorted(
        counts.keys() | place.keys(), key=lambda key: (-counts[key], place.get(key, 2), key)
    )[: len(hot) + len(flex)]
    return Chosen(
        np.array(order[: len(hot)], dtype=np.int64),
        np.array(order[len(hot) :], dtype=np.int64),
        float(counts.total()),
        float(sum(counts[key] for key in place)),
        float(sum(counts[key] for key in order)),
    )
