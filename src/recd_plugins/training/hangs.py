"""How long a training run waits for ranks and readers that hang, and how to go on after that."""

from __future__ import annotations

from recd_plugins.distributed.hang_watch import HangLimits
from recd_plugins.registry import RunConfig
from recd_plugins.training.interrupts import this_command
from recd_plugins.training.trainer import checkpoints_of


def hang_limits(registry: RunConfig) -> HangLimits:
    """How long a run of this registry waits."""
    training = registry.training

    def advice() -> str:
        checkpoints = checkpoints_of(training)
        newest = None if checkpoints is None else checkpoints.newest()
        if newest is not None:
            command = this_command(registry.path, resume=True)
            return (
                f"The last checkpoint is {newest}; the same command with --resume goes on from it: "
                f"{command}"
            )
        if checkpoints is not None:
            command = this_command(registry.path, resume=False)
            return f"No checkpoint was written yet: start anew by {command}"
        return "No checkpoint was written, as training.checkpoint.path is not set: start anew"

    return HangLimits(training.hang_notice, training.hang_timeout, advice)
