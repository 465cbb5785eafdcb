"""What the process group of a sharded module can do."""

from __future__ import annotations

import torch.distributed as dist


def gathers_equal_sizes(group: dist.ProcessGroup | None, device_type: str) -> bool:
    """Whether an all-gather of tensors of a device takes equal sizes alone, as gloo's does.

    Args:
        group: of the module; None: it is on one rank.
        device_type: of the tensors.
    """
    if group is None or device_type == "cpu":
        return device_type == "cpu"
    # "cpu:gloo,cuda:nccl"
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return backends.get(device_type) == "gloo"
