"""Quality of a trained model on the test split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from recd_plugin_scoring.unknown_ids import UnknownIds
from recd_plugins.api import RecdError
from recd_plugins.api.distributed import close_kernels
from recd_plugins.api.registry import RunConfig
from recd_plugins.api.training import Quality, TrainedJob, load_trained, say_other_data


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found, the same on every rank.

    Attributes:
        checkpoint: that was evaluated.
        step: after which it was saved.
        test: quality on the test split.
        metrics: figures of the registry's metrics.
    """

    checkpoint: str
    step: int
    test: Quality
    metrics: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """JSON values, metrics beside the quality, as those of a run."""
        return {
            "checkpoint": self.checkpoint,
            "step": self.step,
            "test": {**asdict(self.test), **self.metrics},
        }


def evaluate(rank: int, world_size: int, job: TrainedJob) -> Evaluated:
    """Evaluate a checkpoint. A collective call in a process group that exists.

    Raises:
        RecdError: the registry, the data or the checkpoint does not allow it.
    """
    trained = load_trained(job)
    if rank == 0 and not trained.same_data:
        say_other_data(job.checkpoint)
    registry = trained.parts.prepared.registry
    unknown = UnknownIds(registry, _readers(registry))
    quality, metrics = trained.evaluate(rank, world_size)
    unknown.say()
    close_kernels(trained.parts.dmp)
    if quality is None:
        raise RecdError(f"{job.registry}: the test split has no row")
    return Evaluated(str(job.checkpoint), trained.step, quality, metrics)


def _readers(registry: RunConfig) -> str | None:
    """What reads in other processes, and what would not; None where the ranks read."""
    if registry.ingestion is not None:
        return f"ingestion {registry.ingestion.plugin.name}"
    workers = registry.training.workers
    return f"training.workers: {workers} (0 counts them)" if workers else None
