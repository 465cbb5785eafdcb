"""Selection of the CPU or CUDA as the training device."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch

from recd_plugins.config import RunConfig, at_entry
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.launch import torchrun_rank, torchrun_ranks_per_node
from recd_plugins.runtime.versions import fbgemm_has_cuda

# Exists if the NVIDIA driver is loaded, even if torch is built without CUDA.
_NVIDIA = Path("/dev/nvidiactl")


def choose_device(registry: RunConfig, *, verbose: bool = False) -> str:
    """Return ``cpu`` or ``cuda``. Rank 0 prints why ``auto`` cannot use this machine's GPU.

    ``verbose`` also prints that the machine has no GPU.

    Raises:
        SetupError: ``training.device`` is ``cuda``, but CUDA is not available.
        RegistryError: a cache does not support the device.
    """
    wanted = registry.training.device
    lack = "" if wanted == "cpu" else lack_for_cuda(_ranks_here(registry))
    if lack and wanted == "cuda":
        raise SetupError(
            f"{registry.path}: training.device is cuda, but {lack}. Fix this problem, or set "
            "training.device: cpu."
        )
    has_gpu = torch.cuda.is_available() or _NVIDIA.exists()
    if lack and (verbose or has_gpu) and torchrun_rank() in (None, 0):
        _print_once(registry.path, f"training.device: auto selects the CPU, because {lack}")
    device = "cpu" if wanted == "cpu" or lack else "cuda"
    for entry in registry.cache:
        with at_entry(registry.path, entry), plugin_call(entry.plugin, "check"):
            entry.plugin.check(torch.device(device))
    return device


@cache
def _print_once(path: Path, message: str) -> None:  # noqa: ARG001
    print(message, file=sys.stderr)


def device_of_rank(kind: str) -> torch.device:
    """Return the CPU device for ``cpu``, or the current CUDA device for ``cuda``."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def lack_for_cuda(ranks: int) -> str:
    """Return the reason why ``ranks`` local processes cannot use CUDA; empty if they can."""
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    if not fbgemm_has_cuda():
        return (
            "the CPU build of FBGEMM is installed (recd doctor shows how to install the CUDA build)"
        )
    devices = torch.cuda.device_count()
    if devices < ranks:
        return f"{ranks} ranks need {ranks} CUDA devices, and this machine has {devices}"
    return ""


def _ranks_here(registry: RunConfig) -> int:
    if torchrun_rank() is None:
        return registry.training.ranks
    return torchrun_ranks_per_node()
