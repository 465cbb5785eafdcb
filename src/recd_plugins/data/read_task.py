"""What a reader anywhere has to know, and the blocks of batches that it makes.

A trainer makes a ``ReadTask`` once and gives it to readers: processes of its own or of other
machines. Of the registry only what reading takes travels: the dataset and its wrappers by class and
options, and the transformations as the trainer has them. A reader neither fits the
converter nor makes preprocessing anew, so its batches are those of the trainer to the bit.
"""

from __future__ import annotations

import os
import pickle
import platform
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recd_plugins.built_in_kinds import BY_NAME
from recd_plugins.data.lookups import RegistryLookups
from recd_plugins.data.model_input import ModelInput
from recd_plugins.data.row_pipeline import RowPipeline, fitted_transforms
from recd_plugins.data.transforms import Transforms
from recd_plugins.errors import PluginError, RecdError
from recd_plugins.interfaces import Dataset, Plugin, Reader, Split
from recd_plugins.plugin_modules import load_file, modules_of_files
from recd_plugins.processes import portable

if TYPE_CHECKING:
    from recd_plugins.registry import Prepared, Registry

#: A position: JSON values, those of ``Reader.state_dict``.
State = dict[str, Any]


@dataclass(frozen=True)
class BatchBlock:
    """Adjacent batches, each with the position after it.

    Attributes:
        number: 0-based from the position that reading started at.
        batches: may be none.
        end: None where more may follow, the position at the end of the epoch, or what went wrong
            after ``batches``.
    """

    number: int
    batches: list[tuple[ModelInput, State]]
    end: State | RecdError | None = None

    def moved(self, packing: float, unpacking: float) -> BatchBlock:
        """The block in the trainer, its batches with the seconds that the way there took.

        Args:
            packing: of the block, in the process that made it.
            unpacking: of the block, in the trainer's.
        """
        moved, left = [], unpacking
        for model_input, position in self.batches:
            making = model_input.making.transferred(packing / len(self.batches)).arrived(left)
            moved.append((replace(model_input, making=making), position))
            left = 0.0
        return replace(self, batches=moved)


@dataclass(frozen=True)
class ReadTask:
    """All that a reader has to know, but the position. Small, and pickled as it is.

    Attributes:
        rank, world_size, split: whose share of which split.
        folder: the trainer's current folder, which relative paths in options are relative to.
        modules: files of a folder of plugins by the name of their module; a reader needs them at
            the same place.
    """

    rank: int
    world_size: int
    split: Split
    folder: Path
    modules: dict[str, Path]
    _pickled: bytes

    @classmethod
    def of(
        cls,
        registry: Registry,
        rank: int,
        world_size: int,
        split: Split = "train",
        prepared: Prepared | None = None,
    ) -> ReadTask:
        """The task of one rank; fits the converter where nobody has yet.

        Args:
            registry: whose data is read.
            rank: whose share is read.
            world_size: ranks that share.
            split: which is read.
            prepared: as ``build_dataloader`` has it.

        Raises:
            PluginError: a plugin, or what it holds, cannot be pickled.
            RecdError: what ``RowPipeline`` raises.
        """
        transforms = fitted_transforms(registry, prepared)
        known = _for_readers(registry)
        lookups = RegistryLookups(known)
        if prepared is not None and registry.wrappers:
            lookups = RegistryLookups(known, prepared.lookups.tables, prepared.lookups.parts)
        try:
            pickled = pickle.dumps((known, lookups, transforms))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PluginError(
                f"{registry.path}: its plugins cannot be sent to a reader: {error}. Plugins travel "
                "by their class, defined at the top of a module, and their options, converters and "
                "preprocessing also with what they hold (Plugin.__getstate__); or let the rank "
                "read by itself, with training.workers: 0 and no ingestion"
            ) from error
        modules = modules_of_files(_plugins(registry))
        return cls(rank, world_size, split, Path.cwd(), modules, pickled)

    def open(self) -> TaskReader:
        """What makes blocks in this process, for any number of positions.

        Makes the trainer's folder the current one where it is there.

        Raises:
            PluginError: a plugin's module is not there, or fails to import.
            DataError: the data is missing or wrong.
        """
        if self.folder.is_dir():
            os.chdir(self.folder)
        for name, file in self.modules.items():
            load_file(name, file)
        try:
            registry, lookups, transforms = pickle.loads(self._pickled)
        except (ImportError, AttributeError) as error:
            raise PluginError(
                f"a reader in {platform.node()} lacks a plugin of the trainer: {error}; install "
                "the same distributions there"
            ) from error
        return TaskReader(self, registry, lookups, transforms)


class TaskReader:
    """Makes blocks of batches; one thread uses it at a time."""

    def __init__(
        self, task: ReadTask, registry: Registry, lookups: RegistryLookups, transforms: Transforms
    ) -> None:
        self._task = task
        self._registry = registry
        self._lookups = lookups
        self._pipeline = RowPipeline(registry, transforms)

    def blocks(
        self, position: State, worker: int, num_workers: int
    ) -> Generator[BatchBlock, None, None]:
        """The blocks ``worker``, ``worker + num_workers``, and so on from ``position`` on.

        What is last has an ``end``: the position at the end of the epoch, or an error. Errors of
        data and plugins are handed out so, never raised.
        """
        return self._blocks(self._new_reader, position, worker, num_workers)

    def block(self, position: State, number: int) -> BatchBlock:
        """The block ``number`` from ``position`` on, the same in any process and at any time.

        Behind the last block is one without batches, with the position at the end of the epoch. A
        dataset whose reader overrides ``blocks`` reads that block alone; one that only iterates
        reads all batches before it too.
        """
        blocks = self._blocks(lambda: self._reader_of_blocks, position, number, sys.maxsize)
        with closing(blocks):
            return next(blocks)

    def num_blocks(self, position: State) -> int | None:
        """Blocks from ``position`` to the end of the epoch; None where that shows by reading only.

        Raises:
            DataError: the position is of other data.
        """
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
            for rows in self._pipeline.reading(reader.blocks(worker, num_workers)):
                for model_input in self._pipeline.read(rows):
                    batches.append((model_input, reader.state_dict()))
                yield BatchBlock(next(numbers), batches)
                batches = []
            yield BatchBlock(next(numbers), [], reader.state_dict())
        except RecdError as error:
            yield BatchBlock(next(numbers), batches, portable(error))

    @cached_property
    def _reader_of_blocks(self) -> Reader:
        """One for block after block: it keeps how it has cut the rest of the epoch."""
        return self._new_reader()

    def _new_reader(self) -> Reader:
        task = self._task
        return self._dataset.reader(
            rank=task.rank,
            world_size=task.world_size,
            batch_size=self._registry.training.batch_size,
            split=task.split,
        )

    @cached_property
    def _dataset(self) -> Dataset:
        return self._registry.wrap_dataset(self._lookups)


def hand_out(blocks: Iterable[BatchBlock], reader: Reader) -> Iterator[ModelInput]:
    """The batches of blocks that come in order; ``reader`` is moved along as if it had read them.

    Raises:
        RecdError: the one that ends the blocks.
    """
    for block in blocks:
        for model_input, position in block.batches:
            reader.load_state_dict(position)
            yield model_input
        if isinstance(block.end, RecdError):
            raise block.end
        if block.end is not None:
            reader.load_state_dict(block.end)
            return


def _for_readers(registry: Registry) -> Registry:
    """Without what only trainers use; transformations travel beside it."""
    return replace(
        registry.with_training({"workers": 0}),
        pooling=(),
        sharding=(),
        cache=(),
        ingestion=None,
        kinds=BY_NAME,
        further={},
    )


def _plugins(registry: Registry) -> Iterator[Plugin]:
    """Those that travel."""
    yield registry.dataset
    yield registry.converter
    for entry in (*registry.wrappers, *registry.preprocessing):
        yield entry.plugin
