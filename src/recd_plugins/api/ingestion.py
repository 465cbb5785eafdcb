"""The work of readers apart from trainers, how blocks of batches travel, and who waits for whom.

For ingestions, and what plans or measures them. Needs torch.
"""

from recd_plugins.activity import doing
from recd_plugins.clock import clock_of
from recd_plugins.cores import available_cores
from recd_plugins.data.ipc import decode, encode
from recd_plugins.data.loader import DataLoader, build_dataloader
from recd_plugins.data.read_task import hand_out, read_task
from recd_plugins.data.stalls import STALL_TARGET, Pace, StallMeter
from recd_plugins.data.workers import WorkerContext
from recd_plugins.interfaces.read_task import BatchBlock, ReadTask, State, TaskReader
from recd_plugins.processes import end_with_parent, portable
from recd_plugins.values.batch import STALL_CAUSES, MakingTimes

__all__ = [
    "STALL_CAUSES",
    "STALL_TARGET",
    "BatchBlock",
    "DataLoader",
    "MakingTimes",
    "Pace",
    "ReadTask",
    "StallMeter",
    "State",
    "TaskReader",
    "WorkerContext",
    "available_cores",
    "build_dataloader",
    "clock_of",
    "decode",
    "doing",
    "encode",
    "end_with_parent",
    "hand_out",
    "portable",
    "read_task",
]
