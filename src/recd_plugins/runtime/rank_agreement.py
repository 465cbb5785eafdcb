"""Collectives for Python objects, and checks that all ranks use the same settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from enum import Enum
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from recd_plugins.runtime.errors import SetupError

T = TypeVar("T")

_SHOWN = 3  # differences
#: Path to a nested value: keys of mappings, and indices in lists.
Place = tuple[str | int, ...]


@torch.compiler.disable
def all_gather_object(step: str, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, like ``torch.distributed.all_gather_object``. Collective.

    Also checks that all ranks are in the same ``step``, a short description of the current step of
    the program.

    Raises:
        SetupError: another rank has called this function with another ``step``.
    """
    if not dist.is_initialized() or dist.get_world_size(group) < 2:
        return [value]
    told: list[Any] = [None] * dist.get_world_size(group)
    with _disable_current_modes():  # private, of torch 2.11 to 2.14
        dist.all_gather_object(told, (step, value), group)
    for rank, (other, _) in enumerate(told):
        if other != told[0][0]:
            raise SetupError(
                f"ranks run different steps: rank 0 is at {told[0][0]}, but rank {rank} is at "
                f"{other}. Run the same program with the same registry file on all ranks."
            )
    return [value for _, value in told]


def from_rank_0(value: T) -> T:
    """Broadcast a picklable value from rank 0. Collective."""
    chosen = [value]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def together(step: Callable[[], T]) -> list[T]:
    """Call ``step`` on every rank, and return all ranks' results. Collective.

    If a rank raises an exception, all ranks raise it.
    """
    outcome: T | Exception
    try:
        outcome = step()
    except Exception as error:
        outcome = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    for each in outcomes:
        if isinstance(each, Exception):
            raise each
    return outcomes


def ranks_of_each_node() -> int:
    """Return the number of ranks per node, from ``LOCAL_WORLD_SIZE``. Collective.

    Without this variable, all ranks are on one node. Raises SetupError if nodes differ.
    """
    world_size = dist.get_world_size()
    mine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    of_all: list[int] = [0] * world_size
    dist.all_gather_object(of_all, mine)
    if len(set(of_all)) > 1 or mine < 1 or world_size % mine:
        raise SetupError(
            f"{world_size} ranks cannot run on nodes of {', '.join(map(str, sorted(set(of_all))))} "
            "ranks (LOCAL_WORLD_SIZE). Start the same number of ranks on every node."
        )
    return mine


def crosses_links() -> bool:
    """Return whether this run uses several nodes, according to ``LOCAL_WORLD_SIZE``."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size


def check_started_alike(device: str, asked: Mapping[str, Any]) -> None:
    """Raise SetupError if the ranks of torchrun have different devices or options. Collective."""
    ranks_of_each_node()
    decided = {"the device (training.device)": device, "options of the command": dict(asked)}
    check_agreement("starting", decided)


@torch.compiler.disable
def check_agreement(
    step: str, decided: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Check that the values in ``decided`` are equal on all ranks. Collective.

    ``step`` is a short description of the current step of the program, for messages. ``decided``
    maps a description to a plain value, dataclass or enum. Of other objects, only the types are
    compared.

    Raises:
        SetupError: values differ. All ranks raise it. The message shows the values of two ranks.
    """
    plain = {what: _plain(value) for what, value in decided.items()}
    texts = {what: json.dumps(value, sort_keys=True) for what, value in plain.items()}
    digests = {what: hashlib.sha256(text.encode()).hexdigest() for what, text in texts.items()}
    told = all_gather_object(step, digests, group)
    differing = [what for what in told[0] if any(each.get(what) != told[0][what] for each in told)]
    if not differing:
        return
    values = all_gather_object(step, {what: plain[what] for what in differing}, group)
    said = []
    for what in differing:
        rank = next(r for r, each in enumerate(told) if each.get(what) != told[0][what])
        both = dict(_leaves(values[0][what])), dict(_leaves(values[rank].get(what)))
        places = [p for p in {**both[0], **both[1]} if both[0].get(p) != both[1].get(p)]
        said += [
            f"{what}{_words(place)} is {_shown(both[0], place)} on rank 0, but "
            f"{_shown(both[1], place)} on rank {rank}"
            for place in islice(places, _SHOWN)
        ]
    raise SetupError(
        f"ranks have different values while {step}: {'; '.join(said)}. Use the same installation, "
        "command, registry file, model and data on all ranks."
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float):  # different CPU models may add in another order
        return float(f"{value:.9g}")
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*place, key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*place, index))
    else:
        yield place, value


def _words(place: Place) -> str:
    """Return a path into nested values as text, such as ``, wrap[0].use``."""
    text = ""
    for key in place:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else f", {key}"
    return text


def _shown(values: Mapping[Place, Any], place: Place) -> str:
    if place not in values:
        return "not set"
    text = json.dumps(values[place])
    return text if len(text) <= 60 else f"{text[:57]}..."


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create a process group with the timeout of the default group. All ranks must call it.

    torch (2.11 to 2.14) uses the default timeout of the backend instead.
    """
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=_timeout())
    return group


def _timeout() -> timedelta | None:
    group = dist.group.WORLD
    assert group is not None, "the caller has one"
    device = dist.get_backend_config(group).partition(":")[0]  # one timeout is set for all devices
    options = group._get_backend(torch.device(device)).options
    return None if options is None else options._timeout


def gathers_equal_sizes(group: dist.ProcessGroup | None, device_type: str) -> bool:
    """Return whether all-gather needs tensors of equal size on a device, as with gloo."""
    if group is None or device_type == "cpu":
        return device_type == "cpu"
    return sends_by_gloo(group, device_type)


def sends_by_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether the process group uses gloo for tensors on ``device_type``."""
    # "cpu:gloo,cuda:nccl"
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return backends.get(device_type) == "gloo"
