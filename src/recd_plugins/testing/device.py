"""The device that tests train on: the CPU, or with ``RECD_TEST_DEVICE=cuda`` the first GPU.

All ranks of a test share that one, so the suite needs no more of a machine. Several ranks talk over
gloo then, which moves tensors of CUDA devices too; NCCL wants a device for each rank.
"""

from __future__ import annotations

import os

import torch

from recd_plugins.runtime.launch import CUDA_BACKEND

__all__ = ["DEVICE", "backend_of_tests"]

_ASKED = os.environ.get("RECD_TEST_DEVICE", "cpu")

#: Where the tests of this process train.
DEVICE = torch.device("cuda", 0) if _ASKED == "cuda" else torch.device(_ASKED)


def backend_of_tests(world_size: int) -> str:
    """The process group's backend of tests that train on ``DEVICE`` with so many ranks."""
    if DEVICE.type != "cuda":
        return "gloo"
    return CUDA_BACKEND if world_size == 1 else "cpu:gloo,cuda:gloo"
