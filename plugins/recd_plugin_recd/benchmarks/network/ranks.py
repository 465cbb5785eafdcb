"""What each rank of a cell does: all sides, in turns. Started by torchrun on every node."""

from __future__ import annotations

import gc
import json
import pickle
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from recd_plugin_recd.benchmarks.network.link_trace import LinkTrace
from recd_plugin_recd.benchmarks.network.one_side import OneSide
from recd_plugins.api import RecdError
from recd_plugins.api.commands import silence_upstream
from recd_plugins.api.distributed import join_torchrun
from recd_plugins.api.registry import TrainingSpec
from recd_plugins.api.training import topology_at_start
from recd_plugins.testing.benchmark import keep_freed_memory

T = TypeVar("T")

_MOST_TURNS = 45
_TRACED = 5  # steps, of which the median one is kept

#: How lines of the first rank begin that say how far it is.
PROGRESS = "recd bench network: "


@dataclass(frozen=True)
class Job:
    """What is measured; travels to the ranks by pickle.

    Attributes:
        registries: by name of the side.
        stock: names of those with TorchRec's own sharders.
        as_stock: of those with ours in place of what these lack.
        ranks_per_node: of each node.
        num_batches: of a rank, which go round.
        turns: of each side, at least.
        steps: timed ones of a turn; one more before them warms up.
        counts_links: whether there are links to count.
        seconds: so long there are more turns, up to ``_MOST_TURNS``.
        traces: whether steps on the link are traced at the end.
    """

    registries: Mapping[str, Path]
    stock: frozenset[str]
    as_stock: frozenset[str]
    ranks_per_node: int
    num_batches: int
    turns: int
    steps: int
    counts_links: bool
    seconds: float = 0.0
    traces: bool = False


@dataclass
class Measured:
    """One side, over all ranks; values are of a step.

    Attributes:
        seconds: wall time by turn.
        stock_seconds: of the fastest stock side of the same run, likewise.
        processor_seconds: of all ranks together, by turn.
        link_bytes: of the node and direction that has most, by the counters of its interface.
        payload: bytes that all ranks send in the same steps, by our own counter.
        link_payload: that a node sends, likewise, the mean of nodes, without headers of packets and
            of gloo's messages.
        payload_between: of what we count, that which leaves a node, as gloo sends it; likewise.
        predicted_between: the same as it was predicted.
        num_batches: that go round, of one rank.
        losses: by step, the mean over ranks.
        predicted_seconds: by the costs of the ranks as they were measured at the start.
        traces: of one step, by rank.
        failure: why it could not be trained; nothing else is known then.
    """

    seconds: list[float] = field(default_factory=list)
    stock_seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    link_bytes: float = 0.0
    payload: float = 0.0
    link_payload: float = 0.0
    payload_between: float = 0.0
    predicted_between: float | None = None
    num_batches: int = 0
    losses: list[float] = field(default_factory=list)
    predicted_seconds: float | None = None
    traces: list[LinkTrace] = field(default_factory=list)
    failure: str | None = None


def measure(rank: int, world_size: int, job: Job) -> dict[str, Measured]:
    """Everything about the sides of a job, by name. A collective call."""
    found = {name: Measured() for name in job.registries}
    sides: dict[str, OneSide] = {}
    topology = None
    if job.counts_links:  # which are what there is to measure
        topology = topology_at_start(TrainingSpec(), "cpu", job.ranks_per_node, resume=False)
    for name, registry in job.registries.items():
        try:
            sides[name] = OneSide(
                registry,
                stock=name in job.stock,
                as_stock=name in job.as_stock,
                num_batches=job.num_batches,
                counts_links=job.counts_links and rank % job.ranks_per_node == 0,
                topology=topology,
            )
        except RecdError as error:  # of the plan or of the registry: all ranks have it
            found[name].failure = str(error)
        _tell(rank, f"{name}: {found[name].failure or 'there'}")
    # Everything that is there stays: collecting garbage need not go through it.
    gc.collect()
    gc.freeze()
    for name, side in sides.items():
        counted = _from_every_rank(side.sent(job.ranks_per_node), world_size)
        found[name].num_batches = len(side.batches)
        found[name].payload = sum(rank.payload for rank in counted)
        found[name].link_bytes = max(rank.link for rank in counted)
        nodes = world_size // job.ranks_per_node
        if job.counts_links:
            sent = sum(rank.link_payload - rank.messages for rank in counted)
            found[name].link_payload = sent / nodes
        found[name].payload_between = sum(rank.payload_between for rank in counted) / nodes
        if (predicted := side.predicted) is not None:
            found[name].predicted_seconds = predicted.stages.total
            across = sum(work.bytes_across_nodes for work in predicted.works) / nodes
            # In a ring a link carries what one rank sends.
            found[name].predicted_between = across + predicted.works[0].bytes_reduced
    spent, turn = 0.0, 0  # the steps that were counted warmed up
    while turn < job.turns or (turn < _MOST_TURNS and spent < job.seconds):
        turn += 1
        order = list(sides.items())
        # Or each follows the same one, which leaves it caches and links as it does.
        random.Random(turn).shuffle(order)
        for name, side in order:
            ranks = _from_every_rank(side.turn(job.steps), world_size)
            spent += job.steps * ranks[0][0]  # the same on all ranks
            found[name].seconds.append(ranks[0][0])
            found[name].processor_seconds.append(sum(processor for _, processor in ranks))
        _tell(rank, f"turn {turn}")
    for name, side in sides.items() if job.traces else ():
        rounds = [_from_every_rank(side.trace(), world_size) for _ in range(_TRACED)]
        # Of rounds, not of ranks: what one rank waits for another does.
        found[name].traces = sorted(rounds, key=lambda ranks: ranks[0].end)[_TRACED // 2]
    for name, side in sides.items():
        curves = _from_every_rank(side.losses(), world_size)
        found[name].losses = [sum(step) / world_size for step in zip(*curves, strict=True)]
    gc.unfreeze()
    return found


def _tell(rank: int, text: str) -> None:
    """A line that the command passes on."""
    if rank == 0:
        print(PROGRESS + text, flush=True)


def _from_every_rank(value: T, world_size: int) -> list[T]:
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, value)
    return everyone


def main() -> None:
    """A rank of torchrun; the first writes what was found."""
    job_path, found_path = map(Path, sys.argv[1:])
    silence_upstream()
    keep_freed_memory()
    with join_torchrun() as (rank, world_size):
        found = measure(rank, world_size, pickle.loads(job_path.read_bytes()))
        if rank == 0:
            values = {name: asdict(each) for name, each in found.items()}
            found_path.write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    main()
