"""Training steps of several batch sizes in turns, so that other load slows all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

    from recd_plugins.training.assembly import Assembled

T = TypeVar("T")

# A pipeline trains on a batch while it sends the next two.
_READ_AHEAD = 2


def steps_in_turns(
    parts: Assembled,
    rank: int,
    world_size: int,
    device: torch.device,
    sizes: Sequence[int],
    *,
    rounds: int,
    lead: int,
    measured: int,
) -> Iterator[tuple[int, Callable[[], object]]]:
    """Yield each step to measure with its batch size; call it before asking for the next.

    Args:
        parts: a model that is ready to train.
        rank: of this process.
        world_size: ranks.
        device: of the model.
        sizes: rows of a rank; they take turns, ``rounds`` times.
        rounds: turns of each size.
        lead: steps of a turn before those to measure.
        measured: steps of a turn to measure.
    """
    pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, device)
    with ExitStack() as stack:
        loaders = {
            size: stack.enter_context(
                parts.prepared.with_training({"batch_size": size}).dataloader(
                    rank=rank, world_size=world_size, device=device
                )
            )
            for size in sizes
        }
        turns = list(sizes) * rounds
        batches = _in_turns(loaders, turns, each=lead + measured + _READ_AHEAD)
        for size in turns:
            for _ in range(lead):
                pipeline.progress(batches)
            for _ in range(measured):
                yield size, lambda: pipeline.progress(batches)
            for _ in range(_READ_AHEAD):
                pipeline.progress(batches)


def _in_turns(
    loaders: Mapping[int, Iterable[T]], turns: Sequence[int], *, each: int
) -> Iterator[T]:
    """Yield ``each`` batches of one size after the other, and more of the last to read ahead."""
    batches = {size: _endless(loader) for size, loader in loaders.items()}
    for size in turns:
        yield from islice(batches[size], each)
    yield from islice(batches[turns[-1]], _READ_AHEAD)


def _endless(loader: Iterable[T]) -> Iterator[T]:
    while True:
        yield from loader
