"""Where a step's time goes, by part of the model, as the DLRM paper's figure 6 shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from recd_plugins.api.planning import stage_of
from recd_plugins.api.training import PROFILED_STEP, Span, StepEvents, read_profile

Part = Literal[
    "lookup", "lookup backward", "MLPs", "interaction", "optimizer", "communication", "other"
]
PARTS: tuple[Part, ...] = (
    "lookup", "lookup backward", "MLPs", "interaction", "optimizer", "communication", "other"
)  # fmt: skip

_RANGE = "## part: {} ##"
_RANGES: dict[str, Part] = {
    _RANGE.format("MLPs"): "MLPs",
    _RANGE.format("interaction"): "interaction",
}
_BACKWARD = "autograd::engine::evaluate_function"


def mark(module: nn.Module, part: Literal["MLPs", "interaction"]) -> None:
    """Have the profiler see where ``module`` begins and ends."""
    forward = module.forward

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(_RANGE.format(part)):
            return forward(*args, **kwargs)

    module.forward = marked


def profile_parts(step: Callable[[], object], on_cuda: bool) -> dict[Part, float]:
    """Seconds of one step by part; they sum to the step.

    What MLPs and interaction do backward are the autograd nodes that their operators made; what
    else runs in autograd's nodes is ``other``. On CUDA a moment belongs to the kernels that run.

    Args:
        step: makes one step, done when it returns.
        on_cuda: where the model is.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler, record_function(PROFILED_STEP):
        step()
    return seconds_by_part(
        read_profile(profiler, torch.device("cuda" if on_cuda else "cpu")), on_cuda
    )


def seconds_by_part(events: StepEvents, on_cuda: bool) -> dict[Part, float]:
    """The same of a step that was profiled."""
    nanoseconds = _of_kernels(events) if on_cuda else _of_thread(events)
    total = events.step.end - events.step.start
    nanoseconds["other"] += total - sum(nanoseconds.values())
    return {part: nanoseconds[part] / 1e9 for part in PARTS}


def _of_thread(events: StepEvents) -> Counter[Part]:
    """A moment belongs to the innermost span that has a part, or to the closest around it."""
    spent: Counter[Part] = Counter()
    step = events.step
    own = [s for s in events.host if s.thread == step.thread and step.start <= s.start < step.end]
    around: list[tuple[int, Part | None]] = []
    now = step.start

    def until(moment: int) -> None:
        nonlocal now
        if around and (innermost := around[-1][1]) is not None:
            spent[innermost] += moment - now
        now = moment

    for span, part in _parts(own, _made(events)):
        while around and around[-1][0] <= span.start:
            until(around[-1][0])
            around.pop()
        until(span.start)
        around.append((span.end, part))
    while around:
        until(max(now, around[-1][0]))
        around.pop()
    return spent


def _of_kernels(events: StepEvents) -> Counter[Part]:
    """Of the device; where kernels overlap, the one that began first counts."""
    made = _made(events)
    launched_in = {
        span.operator: part
        for thread in {span.thread for span in events.host}
        for span, part in _parts((s for s in events.host if s.thread == thread), made)
        if span.operator
    }
    spent: Counter[Part] = Counter()
    now = events.step.start
    for kernel in sorted(events.kernels, key=lambda kernel: kernel.start):
        part = launched_in.get(kernel.operator) or _by_name(kernel.name, backward=False)
        start, end = max(now, kernel.start), min(kernel.end, events.step.end)
        if start < end:
            spent[part or "other"] += end - start
            now = end
    return spent


def _made(events: StepEvents) -> dict[int, Part]:
    """The parts whose forward pass made autograd's nodes, by number of the node."""
    made: dict[int, Part] = {}
    for thread in {span.thread for span in events.host}:
        for span, part in _parts((s for s in events.host if s.thread == thread), {}):
            if span.sequence >= 0 and part is not None and part in _RANGES.values():
                made[span.sequence] = part
    return made


def _parts(spans: Iterable[Span], made: dict[int, Part]) -> Iterator[tuple[Span, Part | None]]:
    """Spans of one thread with their parts, in the order in which they start."""
    around: list[tuple[int, Part | None, bool]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while around and around[-1][0] <= span.start:
            around.pop()
        _, part, backward = around[-1] if around else (0, None, False)
        if span.name.startswith(_BACKWARD):
            backward = True
            part = made.get(span.sequence, part)
        part = _by_name(span.name, backward) or part
        around.append((span.end, part, backward))
        yield span, part


def _by_name(name: str, backward: bool) -> Part | None:
    if name in _RANGES:
        return _RANGES[name]
    if name.startswith(("Optimizer.step", "Optimizer.zero_grad")):
        return "optimizer"
    stage = stage_of(name)
    if stage == "lookup":
        return "lookup backward" if backward or "ackward" in name else "lookup"
    if stage in ("all_to_all", "all_reduce"):
        return "communication"
    return None
