"""All sides of a network cell on one rank, in turns. Started by torchrun on every node."""

from __future__ import annotations

import gc
import json
import pickle
import random
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._measure import from_every_rank, keep_freed_memory
from benchmarks._ranks import RankTrainer
from benchmarks.shaped_network import LinkBytes, link_bytes
from recd_plugins.config import TrainingSpec
from recd_plugins.config.from_file import load_registry
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.imports import silence_upstream
from recd_plugins.runtime.launch import join_torchrun
from recd_plugins.sharding.gradient_dedup import all_gradients_sent
from recd_plugins.sharding.sharders import stock_sharders
from recd_plugins.training.session import topology_at_start
from recd_plugins.training.sharded_model import build_sharded_model

_MOST_TURNS = 45
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """What is measured; travels to the ranks by pickle.

    Attributes:
        registries: by name of the side.
        stock: names of the sides with TorchRec's own sharders.
        as_stock: names of those with ours where TorchRec has none, which send what it would.
        ranks_per_node: of each node.
        num_batches: of a rank, which go round.
        turns: of each side, at least.
        steps: timed ones of a turn; one more before them warms up.
        seconds: so long there are more turns, up to ``_MOST_TURNS``.
    """

    registries: Mapping[str, Path]
    stock: frozenset[str]
    as_stock: frozenset[str]
    ranks_per_node: int
    num_batches: int
    turns: int
    steps: int
    seconds: float = 0.0


@dataclass
class Measured:
    """One side, over all ranks; values are of a step.

    Attributes:
        seconds: wall time by turn.
        processor_seconds: of all ranks together, by turn.
        link_bytes: of the node and direction with most, by the counters of its interface.
        num_batches: of one rank, which go round.
        losses: by step, the mean over ranks.
        failure: why it could not be trained; nothing else is known then.
    """

    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    link_bytes: float = 0.0
    num_batches: int = 0
    losses: list[float] = field(default_factory=list)
    failure: str | None = None


def measure(rank: int, world_size: int, job: Job) -> dict[str, Measured]:
    """Measure all sides of a job, by name. A collective call."""
    found = {name: Measured() for name in job.registries}
    sides: dict[str, RankTrainer] = {}
    # Every side is planned for the nodes as they are measured.
    topology = topology_at_start(TrainingSpec(), "cpu", job.ranks_per_node, resume=False)
    for name in job.registries:
        try:
            sides[name] = _side(name, job, topology)
        except RecdError as error:  # of the plan or of the registry: all ranks have it
            found[name].failure = str(error)
    # Everything that is there stays: collecting garbage need not go through it.
    gc.collect()
    gc.freeze()
    counts_links = rank % job.ranks_per_node == 0
    for name, side in sides.items():
        found[name].num_batches = len(side.batches)
        found[name].link_bytes = max(from_every_rank(_sent(side, counts_links)))
    spent, turn = 0.0, 0  # the steps that were counted warmed up
    while turn < job.turns or (turn < _MOST_TURNS and spent < job.seconds):
        turn += 1
        order = list(sides.items())
        # In one order each side would follow the same one, with its caches and links.
        random.Random(turn).shuffle(order)
        for name, side in order:
            ranks = from_every_rank(side.turn(job.steps))
            spent += job.steps * ranks[0][0]  # the same on all ranks
            found[name].seconds.append(ranks[0][0])
            found[name].processor_seconds.append(sum(processor for _, processor in ranks))
    for name, side in sides.items():
        found[name].losses = side.losses()
    return found


def _side(name: str, job: Job, topology: TopologySpec | None) -> RankTrainer:
    """Shard the model of a side. Batches are of the table's first rows, ranks in turns."""
    registry = load_registry(job.registries[name])
    with all_gradients_sent() if name in job.as_stock else nullcontext():
        sharders = stock_sharders(registry.training) if name in job.stock else None
        parts = build_sharded_model(registry, "plugins", _CPU, sharders=sharders, topology=topology)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Plans look at the first rows: other rows have lists of other lengths.
    loader = parts.prepared.dataloader(rank=0, world_size=1, device=_CPU)
    batches = list(islice(loader, rank, job.num_batches * ranks, ranks))
    parts.dmp.train()
    pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, _CPU)
    return RankTrainer(pipeline, batches, _CPU)


def _sent(side: RankTrainer, counts_links: bool) -> float:
    """Return bytes of this node's link in a step, over one round of all batches."""
    side.steps(1)  # fills the pipeline: what it reads ahead is sent, too
    dist.barrier()
    before = _link(counts_links)
    dist.barrier()
    side.steps(len(side.batches))
    dist.barrier()
    link = _link(counts_links).since(before)
    return max(link.sent, link.received) / len(side.batches)


def _link(counts_links: bool) -> LinkBytes:
    return link_bytes() if counts_links else LinkBytes(0, 0)


def main() -> None:
    """Run as a rank of torchrun; the first one writes what was found."""
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
