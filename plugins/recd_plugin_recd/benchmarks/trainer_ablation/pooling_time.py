"""How much of a step's matrix products, and of its other work, is sequence pooling."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from recd_plugins.api.planning import Stage, stage_of
from recd_plugins.api.training import PROFILED_STEP, device_seconds, host_seconds, read_profile

#: Profiler range around the forward pass of sequence pooling.
POOLING_RANGE = "## sequence pooling ##"

_Interval = tuple[int, int]


def pooling_shares(step: Callable[[], object], device: torch.device) -> dict[Stage, float]:
    """Sequence pooling's share of the stages ``gemm`` and ``other`` of one step of this rank.

    Its forward pass is what runs within ``POOLING_RANGE``, its backward pass the autograd nodes
    that operators in there made.

    Args:
        step: makes one step; profiled here.
        device: of the model.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    dist.barrier()
    with profile(activities=activities) as profiler, record_function(PROFILED_STEP):
        step()
    events = read_profile(profiler, device)
    on_device = device.type == "cuda"
    total = device_seconds(events) if on_device else host_seconds(events)
    pooling = _pooling_seconds(_kineto(profiler), on_device)
    return {
        stage: min(1.0, seconds / total[stage]) if total[stage] else 0.0
        for stage, seconds in pooling.items()
    }


def _kineto(profiler: profile) -> list[Any]:
    # As recd_plugins.training.profile_events: profile.events() takes seconds.
    assert profiler.profiler is not None, "the profile has ended"
    assert profiler.profiler.kineto_results is not None, "the profile has ended"
    return list(profiler.profiler.kineto_results.events())


def _pooling_seconds(events: Sequence[Any], on_device: bool) -> dict[Stage, float]:
    host = [e for e in events if not _on_cuda(e) and not e.is_async() and e.name() != "[memory]"]
    intervals = _intervals(host)
    operators = [e for e in host if _within(e, intervals)]
    products = _union((e.start_ns(), e.end_ns()) for e in operators if stage_of(e.name()) == "gemm")
    # Embeddings are awaited in there, too: waiting is the all-to-all's.
    staged = _union((e.start_ns(), e.end_ns()) for e in operators if stage_of(e.name()) is not None)
    if not on_device:
        return {
            "gemm": _length(products) / 1e9,
            "other": (_length(intervals) - _length(staged)) / 1e9,
        }
    in_products = {e.correlation_id() for e in operators if _within(e, products)}
    unstaged = {e.correlation_id() for e in operators if not _within(e, staged)}
    seconds: dict[Stage, float] = {"gemm": 0.0, "other": 0.0}
    for kernel in filter(_on_cuda, events):
        if kernel.is_user_annotation():
            continue
        if kernel.linked_correlation_id() in in_products:
            seconds["gemm"] += kernel.duration_ns() / 1e9
        elif kernel.linked_correlation_id() in unstaged:
            seconds["other"] += kernel.duration_ns() / 1e9
    return seconds


def _intervals(host: Sequence[Any]) -> list[_Interval]:
    """When sequence pooling runs, forward and backward."""
    forward = _union((e.start_ns(), e.end_ns()) for e in host if e.name() == POOLING_RANGE)
    made = {e.sequence_nr() for e in host if e.sequence_nr() >= 0 and _within(e, forward)}
    backward = [
        (e.start_ns(), e.end_ns())
        for e in host
        if e.name().startswith("autograd::engine::evaluate_function") and e.sequence_nr() in made
    ]
    return _union([*forward, *backward])


def _on_cuda(event: Any) -> bool:
    return bool(event.device_type() == torch._C._autograd.DeviceType.CUDA)


def _within(event: Any, intervals: Sequence[_Interval]) -> bool:
    """Whether an event lies in one of the intervals of a ``_union``."""
    later = bisect_right(intervals, event.start_ns(), key=itemgetter(0))
    return later > 0 and bool(event.end_ns() <= intervals[later - 1][1])


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """The same moments in intervals that do not overlap, in order."""
    merged: list[_Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[_Interval]) -> int:
    return sum(end - start for start, end in intervals)
