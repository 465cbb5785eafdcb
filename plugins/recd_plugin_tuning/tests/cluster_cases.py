from __future__ import annotations

import time
from itertools import cycle

import torch

from recd_plugin_tuning import cluster as module
from recd_plugin_tuning.cluster import MeasuredCluster, measure_cluster
from recd_plugin_tuning.rank_work import Effort, of_all_ranks
from recd_plugins.config import TrainingSpec
from recd_plugins.config.schema import CheckpointSpec
from recd_plugins.planning.topologies import MACHINE, TopologySpec
from recd_plugins.training.session import topology_at_start

WAITED = 0.06
TINY = Effort(sizes=(2**10, 2**12, 2**14), rounds=3, seconds=0.0, most_seconds=5.0)


def measured(rank: int, world_size: int, *_: object) -> MeasuredCluster:
    told: list[str] = []
    found = measure_cluster(torch.device("cpu"), TINY, told.append)
    assert "all-to-all, all ranks" in told
    return found


def waits_each_third_time(rank: int, world_size: int) -> float:
    waits = cycle((0.0, 0.0, WAITED))
    (seconds,) = of_all_ranks(lambda: time.sleep(next(waits)), torch.device("cpu"), 0.0)
    return seconds


def goes_on_until_all_are_done(rank: int, world_size: int) -> int:
    times = 0

    def run() -> None:
        nonlocal times
        times += 1
        time.sleep(WAITED if rank else WAITED / 60)

    of_all_ranks(run, torch.device("cpu"), 0.0)
    return times


def at_start(rank: int, world_size: int, folder: str) -> tuple[list[TopologySpec | None], int]:
    measurements = [0]

    def counted(*_: object) -> MeasuredCluster:
        measurements[0] += 1
        return measure_cluster(torch.device("cpu"), TINY, lambda _: None)

    module.measure_cluster = counted  # type: ignore[assignment]
    try:
        training = TrainingSpec(checkpoint=CheckpointSpec(path=folder))
        machine = TrainingSpec(topology=MACHINE)
        return [
            topology_at_start(training, "cpu", 1, resume=False),
            topology_at_start(training, "cpu", 1, resume=True),
            topology_at_start(machine, "cpu", 1, resume=False),
            topology_at_start(training, "cpu", 2, resume=False),
        ], measurements[0]
    finally:
        module.measure_cluster = measure_cluster
