"""Trains all variants of a network benchmark on one rank, started by torchrun on every node."""

from __future__ import annotations

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

from benchmarks._measure import from_every_rank
from benchmarks._ranks import RankTrainer, freeze_objects, start_rank
from benchmarks.shaped_network import LinkBytes, link_bytes
from recd_plugins.config import TrainingSpec
from recd_plugins.config.from_file import load_registry
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.launch import join_torchrun
from recd_plugins.sharding.gradient_dedup import all_gradients_sent
from recd_plugins.sharding.sharders import stock_sharders
from recd_plugins.training.session import topology_at_start
from recd_plugins.training.sharded_model import build_sharded_model

_MOST_TURNS = 45
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """Job description that is pickled and sent to the ranks.

    Variants in ``stock`` use TorchRec's sharders. Those in ``as_stock`` use sharders of
    recd-plugins that send the same bytes as TorchRec, which has no such sharders on CPU. Turns are
    added, up to ``_MOST_TURNS``, until ``seconds`` have passed.
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
    """Measurements of one variant over all ranks, or the reason why it could not be trained.

    ``seconds`` has the wall time of a step in each turn. ``link_bytes`` are the bytes per step on
    the busiest link and direction, from network interface counters.
    """

    seconds: list[float] = field(default_factory=list)
    link_bytes: float = 0.0
    num_batches: int = 0
    losses: list[float] = field(default_factory=list)
    failure: str | None = None


def measure(rank: int, world_size: int, job: Job) -> dict[str, Measured]:
    """Measure all variants of a job and return the results keyed by name. Collective."""
    found = {name: Measured() for name in job.registries}
    sides: dict[str, RankTrainer] = {}
    # All plans use the same measurements of the nodes.
    topology = topology_at_start(TrainingSpec(), "cpu", job.ranks_per_node, resume=False)
    for name in job.registries:
        try:
            sides[name] = _side(name, job, topology)
        except RecdError as error:  # invalid plan or registry: raised on all ranks
            found[name].failure = str(error)
    freeze_objects()
    counts_links = rank % job.ranks_per_node == 0
    for name, side in sides.items():
        found[name].num_batches = len(side.batches)
        found[name].link_bytes = max(from_every_rank(_sent(side, counts_links)))
    spent, turn = 0.0, 0  # no warm-up turn: counting the bytes was one
    while turn < job.turns or (turn < _MOST_TURNS and spent < job.seconds):
        turn += 1
        order = list(sides.items())
        # With a fixed order, each variant would always inherit caches from the same one.
        random.Random(turn).shuffle(order)
        for name, side in order:
            seconds = side.turn(job.steps)
            spent += job.steps * seconds  # the same on all ranks
            found[name].seconds.append(seconds)
    for name, side in sides.items():
        found[name].losses = side.losses()
    return found


def _side(name: str, job: Job, topology: TopologySpec | None) -> RankTrainer:
    """Build the sharded model of a variant, with batches from the first rows of its table."""
    registry = load_registry(job.registries[name])
    with all_gradients_sent() if name in job.as_stock else nullcontext():
        sharders = stock_sharders(registry.training) if name in job.stock else None
        parts = build_sharded_model(registry, "plugins", _CPU, sharders=sharders, topology=topology)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Plans use the first rows; later rows have lists of different lengths.
    loader = parts.prepared.dataloader(rank=0, world_size=1, device=_CPU)
    batches = list(islice(loader, rank, job.num_batches * ranks, ranks))
    parts.dmp.train()
    pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, _CPU)
    return RankTrainer(pipeline, batches, _CPU)


def _sent(side: RankTrainer, counts_links: bool) -> float:
    """Return the bytes per step on this node's link, measured over all batches."""
    side.steps(1)  # fills the pipeline, because prefetching sends bytes, too
    dist.barrier()
    before = link_bytes() if counts_links else LinkBytes(0, 0)
    dist.barrier()
    side.steps(len(side.batches))
    dist.barrier()
    link = link_bytes().since(before) if counts_links else before
    return max(link.sent, link.received) / len(side.batches)


def main() -> None:
    """Run the job as a rank of torchrun. Rank 0 writes the results to a JSON file."""
    job_path, found_path = map(Path, sys.argv[1:])
    start_rank()
    with join_torchrun() as (rank, world_size):
        found = measure(rank, world_size, pickle.loads(job_path.read_bytes()))
        if rank == 0:
            values = {name: asdict(each) for name, each in found.items()}
            found_path.write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    main()
