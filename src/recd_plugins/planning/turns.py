"""Batches of several sizes that take turns, for timing them side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def in_turns(
    loaders: Mapping[int, Iterable[T]], turns: Sequence[int], *, each: int, ahead: int
) -> Iterator[T]:
    """Batches of one size after the other, epoch after epoch.

    Args:
        loaders: by batch size.
        turns: the sizes.
        each: batches of a turn.
        ahead: some more of the last size, for a pipeline that reads ahead.
    """
    batches = {size: _endless(loader) for size, loader in loaders.items()}
    for size in turns:
        yield from islice(batches[size], each)
    yield from islice(batches[turns[-1]], ahead)


def _endless(loader: Iterable[T]) -> Iterator[T]:
    while True:
        yield from loader
