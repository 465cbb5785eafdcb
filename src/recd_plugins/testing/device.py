"""The device of distributed tests: the CPU, or the first GPU if ``RECD_TEST_DEVICE=cuda``.

All ranks of a test share the device and use gloo, because NCCL needs one GPU per rank.
"""

from __future__ import annotations

import os

import torch

from recd_plugins.runtime.launch import CUDA_BACKEND

__all__ = ["DEVICE", "backend_of_tests"]

_ASKED = os.environ.get("RECD_TEST_DEVICE", "cpu")

#: Device that the tests of this process train on.
DEVICE = torch.device("cuda", 0) if _ASKED == "cuda" else torch.device(_ASKED)


def backend_of_tests(world_size: int) -> str:
    """Return the process group backend for ``world_size`` ranks on ``DEVICE``."""
    if DEVICE.type != "cuda":
        return "gloo"
    return CUDA_BACKEND if world_size == 1 else "cpu:gloo,cuda:gloo"
