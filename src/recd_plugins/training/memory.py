"""Peak memory of a stretch of training."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def reset_peak(device: torch.device) -> None:
    """Start a new stretch. Where the system keeps one peak for a whole process, as on macOS, the
    stretch is the process's life."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        # Give memory of the set-up back first: it would count as used.
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The most memory in use since ``reset_peak``: allocated on a CUDA device, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
