"""Process groups: new ones, and what that of a sharded module can do."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group of some ranks that waits as long as the default one. Every rank calls it.

    torch (2.11 to 2.14) gives a new group the timeout of its backend, not that of the trainer.

    Args:
        ranks: of the group.
    """
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=_timeout())
    return group


def _timeout() -> timedelta | None:
    """That of the default process group; None where its backend has none."""
    group = dist.group.WORLD
    assert group is not None, "the caller has one"
    device = dist.get_backend_config(group).partition(":")[0]  # one timeout is set for all devices
    options = group._get_backend(torch.device(device)).options
    return None if options is None else options._timeout


def gathers_equal_sizes(group: dist.ProcessGroup | None, device_type: str) -> bool:
    """Whether an all-gather of tensors of a device takes equal sizes alone, as gloo's does."""
    if group is None or device_type == "cpu":
        return device_type == "cpu"
    return sends_by_gloo(group, device_type)


def sends_by_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether it is gloo that sends tensors of a device."""
    # "cpu:gloo,cuda:nccl"
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return backends.get(device_type) == "gloo"
