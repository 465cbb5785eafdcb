"""Read tasks: a rank's share of the data, as readers in other processes or machines need it.

Only the reading part of the registry travels: the dataset and its wrappers by class and options,
and the transformations as the trainer has them. A reader neither fits the converter nor makes
preprocessing anew, so its batches are those of the trainer to the bit.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import cached_property, partial
from itertools import count
from pathlib import Path

from recd_plugins.data.prepared import PreparedModel
from recd_plugins.data.row_pipeline import RowPipeline, Transforms, fitted_transforms
from recd_plugins.data.wrapped_dataset import RegistryLookups
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Dataset, Feed, Ingestion, Plugin, Reader, Split, TableStrategy
from recd_plugins.interfaces.ingestion import BatchBlock, ReadTask, State, TaskReader
from recd_plugins.plugin_call import plugin_call, plugin_items
from recd_plugins.plugin_modules import modules_of_files
from recd_plugins.processes import portable
from recd_plugins.registry import RunConfig
from recd_plugins.registry.entries import Entry, at_entry
from recd_plugins.values.batch import ModelInput


def read_task(
    registry: RunConfig,
    rank: int,
    world_size: int,
    split: Split = "train",
    prepared: PreparedModel | None = None,
) -> ReadTask:
    """Make the task of one rank; fits the converter where nobody has yet.

    Args:
        registry: whose data is read.
        rank: whose share is read.
        world_size: ranks that share.
        split: which is read.
        prepared: as ``build_dataloader`` has it.

    Raises:
        PluginError: a plugin, or its state, cannot be pickled.
        RecdError: as ``RowPipeline``.
    """
    transforms = fitted_transforms(registry, prepared)
    known = _for_readers(registry)
    lookups, parts = RegistryLookups(known), tuple[TableStrategy, ...]()
    if prepared is not None and registry.wrappers:
        parts = tuple(prepared.lookups.parts)
        lookups = RegistryLookups(known, prepared.lookups.tables, parts)
    reader = partial(_Reader, registry=known, lookups=lookups, transforms=transforms)
    try:
        pickled = pickle.dumps(reader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PluginError(
            f"{registry.path}: its plugins cannot be sent to a reader: {error}. Plugins travel "
            "by their class, defined at the top of a module, and their options, converters and "
            "preprocessing also with what they hold (Plugin.__getstate__); or let the rank "
            "read by itself, with training.workers: 0 and no ingestion"
        ) from error
    # Parts too may be of a file, though the sharding or cache that made them stays here.
    modules = modules_of_files(map(type, (*_plugins(registry), *parts)))
    return ReadTask(rank, world_size, split, Path.cwd(), modules, pickled)


class _Reader(TaskReader):
    """Makes the blocks of a task."""

    def __init__(
        self, task: ReadTask, registry: RunConfig, lookups: RegistryLookups, transforms: Transforms
    ) -> None:
        self._task = task
        self._registry = registry
        self._lookups = lookups
        self._pipeline = RowPipeline(registry, transforms)

    def blocks(
        self, position: State, worker: int, num_workers: int
    ) -> Generator[BatchBlock, None, None]:
        """See ``TaskReader.blocks``."""
        return self._blocks(self._new_reader, position, worker, num_workers)

    def block(self, position: State, number: int) -> BatchBlock:
        """See ``TaskReader.block``."""
        blocks = self._blocks(lambda: self._reader_of_blocks, position, number, sys.maxsize)
        with closing(blocks):
            return next(blocks)

    def num_blocks(self, position: State) -> int | None:
        """See ``TaskReader.num_blocks``."""
        self._reader_of_blocks.load_state_dict(position)
        return self._reader_of_blocks.num_blocks()

    def _blocks(
        self, reader_of: Callable[[], Reader], position: State, worker: int, num_workers: int
    ) -> Generator[BatchBlock, None, None]:
        numbers = count(worker, num_workers)
        batches: list[tuple[ModelInput, State]] = []
        try:
            reader = reader_of()
            with plugin_call(self._dataset, "load_state_dict of a reader"):
                reader.load_state_dict(position)
            for rows in self._pipeline.reading(reader.blocks(worker, num_workers)):
                for model_input in self._pipeline.read(rows):
                    batches.append((model_input, self._position_of(reader)))
                yield BatchBlock(next(numbers), batches)
                batches = []
            yield BatchBlock(next(numbers), [], self._position_of(reader))
        except Exception as error:
            yield BatchBlock(next(numbers), batches, portable(error))

    def _position_of(self, reader: Reader) -> State:
        with plugin_call(self._dataset, "state_dict of a reader"):
            return reader.state_dict()

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
    """Yield the batches of blocks; ``reader`` moves along as if it had read them.

    Raises:
        Exception: the one that ends the blocks.
        PluginError: a block is missing, or comes twice or out of its turn.
    """
    for expected, block in enumerate(blocks):
        if block.number != expected:
            raise PluginError(
                f"the ingestion handed out block {block.number} where block {expected} is due: "
                "blocks come once each, in the order of their numbers"
            )
        for model_input, position in block.batches:
            reader.load_state_dict(position)
            yield model_input
        if isinstance(block.end, Exception):
            raise block.end
        if block.end is not None:
            reader.load_state_dict(block.end)
            return


def _for_readers(registry: RunConfig) -> RunConfig:
    """The part of a registry that reading needs; transformations travel beside it."""
    one = registry.with_training({"workers": 0})
    return RunConfig(
        one.path,
        one.spec,
        one.dataset,
        one.converter,
        one.preprocessing,
        pooling=(),
        sharding=(),
        cache=(),
        wrappers=one.wrappers,
    )


def _plugins(registry: RunConfig) -> Iterator[Plugin]:
    """The plugins that travel."""
    yield registry.dataset
    yield registry.converter
    for entry in (*registry.wrappers, *registry.preprocessing):
        yield entry.plugin


def check_ingestion(registry: RunConfig) -> None:
    """Refuse to start where the registry's ingestion cannot run."""
    if (entry := registry.ingestion) is None:
        return
    with at_entry(registry.path, entry), plugin_call(entry.plugin, "check"):
        entry.plugin.check()


class IngestionFeed(Feed):
    """The feed that the ingestion of a registry opens for one rank and split; errors name it.

    Args:
        path: of the registry file.
        entry: of its ingestion.
        task: of the rank.
    """

    def __init__(self, path: Path, entry: Entry[Ingestion], task: ReadTask) -> None:
        self._plugin = entry.plugin
        with at_entry(path, entry), plugin_call(self._plugin, "open"):
            self._feed = self._plugin.open(task)

    def read(self, reader: Reader) -> Iterator[ModelInput]:
        """See ``Feed.read``."""
        with plugin_call(self._plugin, "read"):
            batches = self._feed.read(reader)
        return plugin_items(self._plugin, "reading", batches)

    def report(self) -> Mapping[str, float]:
        """See ``Feed.report``."""
        with plugin_call(self._plugin, "report"):
            return self._feed.report()

    def close(self) -> None:
        """See ``Feed.close``."""
        with plugin_call(self._plugin, "close"):
            self._feed.close()
