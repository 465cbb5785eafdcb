"""Resumable data loader of a rank, and read tasks for reader processes.

A read task contains the dataset with its wrappers, and the trainer's fitted converter and
preprocessing. Batches from readers are bitwise equal to batches from the training process.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from recd_plugins.config import RunConfig
from recd_plugins.config.entries import at_entry
from recd_plugins.data.prepared import (
    PreparedModel,
    RegistryLookups,
    with_sessions,
    wrapped_dataset,
)
from recd_plugins.data.row_pipeline import RowPipeline
from recd_plugins.data.rows import concat_rows
from recd_plugins.interfaces import Dataset, Feed, Reader, Rows, Split, TableStrategy
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.dataset import StreamReader
from recd_plugins.interfaces.ingestion import BatchBlock, ReadTask, State, TaskReader
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.activity import doing
from recd_plugins.runtime.plugin_modules import modules_of_files
from recd_plugins.runtime.processes import portable
from recd_plugins.runtime.rank_agreement import all_gather_object


def read_task(
    registry: RunConfig,
    rank: int,
    world_size: int,
    split: Split = "train",
    prepared: PreparedModel | None = None,
) -> ReadTask:
    """Create a picklable task that lets another process read the batches of one rank.

    The arguments are those of ``build_dataloader``. Plugin classes must be importable in the
    other process, and ``Plugin.__getstate__`` must omit attributes that cannot be pickled.
    """
    pipeline = RowPipeline.of_model(registry, prepared)
    spec = registry.with_training({"workers": 0}).spec
    data = registry.dataset, registry.converter, registry.preprocessing
    known = RunConfig(registry.path, spec, *data, (), (), (), wrappers=registry.wrappers)
    lookups, parts = RegistryLookups(known), tuple[TableStrategy, ...]()
    if prepared is not None and registry.wrappers:
        parts = tuple(prepared.lookups.parts)
        lookups = RegistryLookups(known, prepared.lookups.tables, parts)
    reader = partial(_Reader, registry=known, lookups=lookups, pipeline=pipeline)
    entries = (*registry.wrappers, *registry.preprocessing)
    plugins = (registry.dataset, registry.converter, *(entry.plugin for entry in entries))
    modules = modules_of_files(map(type, (*plugins, *parts)))
    return ReadTask(rank, world_size, split, Path.cwd(), modules, pickle.dumps(reader))


@dataclass
class _Reader(TaskReader):
    task: ReadTask
    registry: RunConfig
    lookups: RegistryLookups
    pipeline: RowPipeline

    def blocks(
        self, position: State, worker: int, num_workers: int
    ) -> Generator[BatchBlock, None, None]:
        return self._blocks(self._new_reader, position, worker, num_workers)

    def block(self, position: State, number: int) -> BatchBlock:
        blocks = self._blocks(lambda: self._reader_of_blocks, position, number, sys.maxsize)
        with closing(blocks):
            return next(blocks)

    def num_blocks(self, position: State) -> int | None:
        self._reader_of_blocks.load_state_dict(position)
        return self._reader_of_blocks.num_blocks()

    def _blocks(
        self, reader_of: Callable[[], Reader], position: State, worker: int, num_workers: int
    ) -> Generator[BatchBlock, None, None]:
        numbers = count(worker, num_workers)
        batches: list[tuple[ModelInput, State]] = []
        try:
            reader = reader_of()
            reader.load_state_dict(position)
            for rows in self.pipeline.reading(reader.blocks(worker, num_workers)):
                for model_input in self.pipeline.read(rows):
                    batches.append((model_input, reader.state_dict()))
                yield BatchBlock(next(numbers), batches)
                batches = []
            yield BatchBlock(next(numbers), [], reader.state_dict())
        except Exception as error:
            yield BatchBlock(next(numbers), batches, portable(error))

    @cached_property
    def _reader_of_blocks(self) -> Reader:
        """Return the reader that ``block`` uses. It caches the positions of the epoch's blocks."""
        return self._new_reader()

    def _new_reader(self) -> Reader:
        return self._dataset.reader(
            rank=self.task.rank,
            world_size=self.task.world_size,
            batch_size=self.registry.training.batch_size,
            split=self.task.split,
        )

    @cached_property
    def _dataset(self) -> Dataset:
        return self.registry.wrap_dataset(self.lookups)


def check_ingestion(registry: RunConfig) -> None:
    """Call ``Ingestion.check`` if the config has an ingestion plugin."""
    if (entry := registry.ingestion) is None:
        return
    with at_entry(registry.path, entry), plugin_call(entry.plugin, "check"):
        entry.plugin.check()


_END: Any = object()
# A signal ends the wait for a stream after this time.
_SECONDS_OF_POLL = 0.5
_POLLS_UNTIL_IDLE = 2
_POLLS_UNTIL_TOLD = 120


class DataLoader:
    """Iterates over one rank's batches from the current position to the end of the epoch.

    Closing the loader closes ``feed``, the source of the batches. All ranks iterate over a stream
    together: it ends when it ends for a rank, or when ``interrupted`` returns True on a rank.

    If a stream has no new batch for a second, the iteration ends with ``is_idle``, so that a train
    pipeline trains the batches that it has prefetched. The next iteration waits for a batch.

    Attributes:
        is_idle: whether the last iteration ended because a stream had no new batch.
        lag: number of rows of a stream behind its end, over all ranks; None for other datasets.
    """

    def __init__(
        self, reader: Reader, feed: Feed, pin_memory: bool, *, world_size: int = 1
    ) -> None:
        self._reader = reader
        self._feed = feed
        self._pin_memory = pin_memory
        self._world_size = world_size
        self._stream = reader if isinstance(reader, StreamReader) else None
        self.interrupted: Callable[[], bool] = lambda: False
        self.is_idle = False
        self.lag: int | None = None

    def __len__(self) -> int:
        return len(self._reader)

    def __iter__(self) -> Iterator[ModelInput]:
        batches = iter(self._feed.read(self._reader))
        self.is_idle = False
        for number in count():
            if self._stream is not None and not self._has_batch(self._stream, first=number == 0):
                return
            with doing("reading data"):
                model_input = next(batches, _END)
            if model_input is _END:
                return
            yield pinned(model_input) if self._pin_memory else model_input

    def _has_batch(self, stream: StreamReader, *, first: bool) -> bool:
        """Wait until each rank has a batch. Return False if the stream has ended or is idle."""
        for number in count(1):
            with doing("waiting for messages"):
                found = stream.poll(_SECONDS_OF_POLL)
            ended = found is None or self.interrupted()
            sums = torch.tensor([bool(found), ended, stream.lag()], dtype=torch.int64)
            if self._world_size > 1:
                dist.all_reduce(sums)
            ready, ended, self.lag = sums.tolist()
            if ended or ready == self._world_size:
                return not ended
            if number == _POLLS_UNTIL_TOLD and ready:
                self._say_waits(bool(found))
            if not first and number == _POLLS_UNTIL_IDLE:
                self.is_idle = True
                return False
        raise AssertionError("the loop has no end")

    def _say_waits(self, has_batch: bool) -> None:
        if not has_batch:
            rank, seconds = dist.get_rank(), _POLLS_UNTIL_TOLD * _SECONDS_OF_POLL
            print(
                f"rank {rank} has had no full batch for {seconds:.0f} s, and the other ranks wait "
                "for it. Check that its share of the stream, such as its Kafka partitions, gets "
                "new rows.",
                file=sys.stderr,
                flush=True,
            )

    @property
    def is_stream(self) -> bool:
        return self._stream is not None

    def merged(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the position of all ranks for a checkpoint, from each rank's position.

        All ranks must call it.
        """
        if self._stream is None or state is None:
            return state
        states = [state]
        if self._world_size > 1:
            states = all_gather_object("saving positions of the stream", state)
        return self._stream.merge_states(states)

    def num_left(self) -> int | None:
        """Return the number of remaining batches in the epoch, or None if unknown."""
        return self._reader.num_left()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, for a checkpoint.

        A train pipeline prefetches batches, so this position is ahead of training. Iterate over a
        ``recd_plugins.BatchSource`` instead, which tracks the position of training.
        """
        return self._reader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reader.load_state_dict(state)

    def report(self) -> Mapping[str, float]:
        """Return metrics of the ingestion plugin, keyed by name. Also works after ``close``."""
        return self._feed.report()

    def close(self) -> None:
        """Stop the processes that produce batches. Leaving the context calls this method."""
        self._feed.close()
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_dataloader(
    registry: RunConfig,
    rank: int,
    world_size: int,
    split: Split = "train",
    device: torch.device | None = None,
    *,
    prepared: PreparedModel | None = None,
) -> DataLoader:
    """Build a data loader for this rank's share of a split, with ``training.batch_size`` rows.

    Batches are in host memory, pinned for a CUDA ``device``. Reader processes
    (``training.workers``) and ingestion plugins produce the same batches as this process. If
    ``prepared`` is None, the loader is for the built-in model and does not check ids.

    Raises:
        DataError: the data is missing or wrong.
        RegistryError: a pattern matches no feature, or a dataset wrapper rejects the model.
    """
    if prepared is not None and split == "train":
        prepared.check_wrappers()
    dataset = wrapped_dataset(registry) if prepared is None else prepared.wrapped_dataset
    reader = dataset.reader(
        rank=rank, world_size=world_size, batch_size=registry.training.batch_size, split=split
    )
    pin_memory = device is not None and device.type == "cuda"
    entry, num_workers = registry.ingestion, registry.training.workers
    feed: Feed
    if entry is None and not num_workers:
        feed = RowPipeline.of_model(registry, prepared)
        return DataLoader(reader, feed, pin_memory, world_size=world_size)
    task = read_task(registry, rank, world_size, split, prepared)
    if entry is None:
        from recd_plugins.data.workers import Workers

        feed = Workers(task, num_workers, pin_memory)
    else:
        with at_entry(registry.path, entry), plugin_call(entry.plugin, "open"):
            feed = entry.plugin.open(task)
    return DataLoader(reader, feed, pin_memory)


def pinned(model_input: ModelInput) -> ModelInput:
    """Copy a batch to pinned memory, so that its copy to a device overlaps with compute."""
    start = time.perf_counter()
    copy = model_input.pin_memory()
    return replace(copy, making=copy.making.arrived(time.perf_counter() - start))


class EveryRow:
    """Batches of one rank that cover all rows of a split, including the last rows.

    Full batches of ``training.batch_size`` rows come from the dataset's reader, without wrappers.
    The remaining rows are distributed over the ranks. Copies of the last row fill the last batch,
    since kernels may need a fixed batch size. ``sessions`` reads the session column, if there is
    one.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        rank: int,
        world_size: int,
        split: Split,
        device: torch.device,
        *,
        sessions: bool,
    ) -> None:
        registry = prepared.registry
        wrappers = with_sessions(registry.dataset) if sessions else ()
        prepared = replace(prepared, registry=replace(registry, wrappers=wrappers))
        self._prepared, self._split = prepared, split
        self._pin_memory = device.type == "cuda"
        self._batch_size = size = registry.training.batch_size
        self._loader: DataLoader | None = None
        self._num_rows = num_rows = len(self._row_by_row())
        in_full = 0
        if num_rows >= world_size * size:
            self._loader = build_dataloader(
                prepared.registry, rank, world_size, split, device, prepared=prepared
            )
            in_full = len(self._loader) * world_size * size
        share = -(-(num_rows - in_full) // world_size)
        first = in_full + rank * share
        self._rest = [
            range(first + done, min(first + min(done + size, share), num_rows))
            for done in range(0, share, size)
        ]

    def __len__(self) -> int:
        """Return the number of batches of each rank."""
        return len(self._rest) + (0 if self._loader is None else len(self._loader))

    def __iter__(self) -> Iterator[tuple[ModelInput, int]]:
        """Yield tuples of a batch and its number of rows, not counting copies of the last row."""
        if self._loader is not None:
            for batch in self._loader:
                yield batch, self._batch_size
        if self._rest:
            pipeline = RowPipeline.of_model(self._prepared.registry, self._prepared)
            for rows in self._rest:
                (batch,) = pipeline.read([self._filled(rows)])
                yield pinned(batch) if self._pin_memory else batch, len(rows)

    def _filled(self, wanted: range) -> Rows:
        """Read the rows ``wanted``, at least one. Copies of the last row fill the batch."""
        reader = self._row_by_row()
        reader.skip(min(wanted.start, self._num_rows - 1))
        rows = list(islice(reader, max(len(wanted), 1)))
        return concat_rows(rows + rows[-1:] * (self._batch_size - len(rows)))

    def _row_by_row(self) -> Reader:
        dataset = self._prepared.wrapped_dataset
        return dataset.reader(rank=0, world_size=1, batch_size=1, split=self._split)

    def close(self) -> None:
        """Stop the processes that produce batches."""
        if self._loader is not None:
            self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
