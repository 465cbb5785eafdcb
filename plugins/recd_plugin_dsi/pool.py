"""The size of a pool of readers while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

# Of Ray's private names: the pool of a running Dataset has no public ones that set its size. Ray
# 2.60; the callback itself is registered by a public field of DataContext.
from ray.data._internal.actor_autoscaler import ActorPoolScalingRequest
from ray.data._internal.execution.execution_callback import ExecutionCallback

if TYPE_CHECKING:
    from ray.data._internal.execution.streaming_executor import StreamingExecutor


@dataclass
class Pool:
    """Of the Datasets that this process runs.

    Attributes:
        target: readers that each is to have.
        running: readers that there are, by execution; not those that Ray is starting.
        started: called when the first reader is there.
    """

    target: int
    running: dict[int, int]
    started: Callable[[], None]

    @property
    def size(self) -> int:
        """Readers that there are."""
        return sum(self.running.values())


#: Set before a Dataset is iterated over.
POOL = Pool(1, {}, lambda: None)


class KeepTarget(ExecutionCallback):
    """Adds and removes readers while they are not as many as asked for."""

    def on_execution_step(self, executor: StreamingExecutor) -> None:
        for operator in executor._topology:
            for pool in operator.get_autoscaling_actor_pools():
                before = POOL.size
                POOL.running[id(executor)] = pool.num_running_actors()
                if before == 0 and POOL.size:
                    POOL.started()
                missing = POOL.target - pool.current_size()
                if missing > 0:
                    pool.scale(ActorPoolScalingRequest.upscale(delta=missing, reason="stalls"))
                elif missing < 0:  # only those that have nothing to do
                    pool.scale(ActorPoolScalingRequest.downscale(delta=missing, reason="stalls"))
