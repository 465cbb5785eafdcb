"""Ranks that tell one another what they decided, before they train, and refuse to differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from recd_plugins.errors import SetupError
from recd_plugins.words import shortened

T = TypeVar("T")

_SHOWN = 3  # differences
#: Where a value stands in what was decided: keys, and numbers in lists.
Place = tuple[str | int, ...]


class RanksDifferError(SetupError):
    """Ranks decided differently.

    Attributes:
        keys: of all values that differ, as names of tables and of parameters.
    """

    keys: frozenset[str] = frozenset()


@torch.compiler.disable
def tell_all(step: str, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank tells in one step of its start, by rank. A collective call.

    Ranks that are at different steps find one another here, as all of them call this. It is no
    part of a training step: byte counters do not see it.

    Args:
        step: what this rank is doing, for messages.
        value: travels by pickle.
        group: of the ranks; the default one without it.

    Raises:
        SetupError: another rank is at another step.
    """
    if not dist.is_initialized() or dist.get_world_size(group) < 2:
        return [value]
    told: list[Any] = [None] * dist.get_world_size(group)
    with _disable_current_modes():  # private, of torch 2.11 to 2.14
        dist.all_gather_object(told, (step, value), group)
    for rank, (other, _) in enumerate(told):
        if other != told[0][0]:
            raise SetupError(
                f"ranks do not do the same: rank 0 is at {told[0][0]}, rank {rank} at {other}; let "
                "all ranks run one program, with one registry file and batches of one make"
            )
    return [value for _, value in told]


@torch.compiler.disable
def check_agreement(
    step: str, decided: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Refuse ranks that decided differently. A collective call, which sends a digest of each thing.

    Args:
        step: what this rank is doing, for messages.
        decided: by what it is, in words. Of objects other than plain values, dataclasses and enums
            the type alone counts.
        group: of the ranks; the default one without it.

    Raises:
        SetupError: on all ranks: which thing differs, with the values of two ranks.
    """
    plain = {what: _plain(value) for what, value in decided.items()}
    texts = {what: json.dumps(value, sort_keys=True) for what, value in plain.items()}
    digests = {what: hashlib.sha256(text.encode()).hexdigest() for what, text in texts.items()}
    told = tell_all(step, digests, group)
    differing = [what for what in told[0] if any(each.get(what) != told[0][what] for each in told)]
    if not differing:
        return
    values = tell_all(step, {what: plain[what] for what in differing}, group)
    said, keys = [], set[str]()
    for what in differing:
        rank = next(r for r, each in enumerate(told) if each.get(what) != told[0][what])
        both = dict(_leaves(values[0][what])), dict(_leaves(values[rank].get(what)))
        places = [p for p in {**both[0], **both[1]} if both[0].get(p) != both[1].get(p)]
        keys |= {key for place in places for key in place if isinstance(key, str)}
        said += [
            f"{what}{_words(place)}: {_shown(both[0], place)} on rank 0, "
            f"{_shown(both[1], place)} on rank {rank}"
            for place in islice(places, _SHOWN)
        ]
    error = RanksDifferError(
        f"ranks have decided differently ({step}): {'; '.join(said)}. They would exchange what "
        "does not go together: give all ranks one installation, one command, one registry file, "
        "one model and the same data"
    )
    error.keys = frozenset(keys)
    raise error


@contextmanager
def entries_named(entries: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """A context in which ranks that decided differently on a table are told whose it is.

    Args:
        entries: titles of the entries by table name; asked where ranks differ.

    Raises:
        RanksDifferError: as it was raised, with the entries of the tables that differ.
    """
    try:
        yield
    except RanksDifferError as error:
        tables: dict[str, list[str]] = {}
        for table, title in entries().items():
            parameter = f".{table}.weight"
            if table in error.keys or any(key.endswith(parameter) for key in error.keys):
                tables.setdefault(title, []).append(table)
        if not tables:
            raise
        said = "; ".join(f"{title} ({shortened(names)})" for title, names in tables.items())
        named = RanksDifferError(
            f"{error}. Entries of what differs: {said}; what their plugins decide has to be the "
            "same on every rank"
        )
        named.keys = error.keys
        raise named from error


def _plain(value: Any) -> Any:
    """JSON values; what has an address in its words has none here."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float):  # processors of two kinds may add in another order
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
    """As ``, bags.t_user.num_embeddings`` or ``, wrap[0].use``."""
    text = ""
    for key in place:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else f", {key}"
    return text


def _shown(values: Mapping[Place, Any], place: Place) -> str:
    if place not in values:
        return "nothing"
    text = json.dumps(values[place])
    return text if len(text) <= 60 else f"{text[:57]}..."
