"""Base classes of ingestion plugins, which produce batches outside the training process."""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from recd_plugins.interfaces.dataset import Reader, Split
from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.runtime.plugin_modules import load_file

if TYPE_CHECKING:
    from recd_plugins.interfaces.batch import ModelInput

#: Position in the data: the JSON values of ``Reader.state_dict``.
State = dict[str, Any]


@dataclass(frozen=True)
class BatchBlock:
    """Block of adjacent batches of one rank, the unit of transfer from reader to trainer.

    Attributes:
        number: 0-based number of the block, counted from the position at which reading started.
        batches: pairs of a batch and the reader position after this batch.
        end: reader position at the end of the epoch, or the error that follows ``batches``; None if
            more blocks may follow.
    """

    number: int
    batches: list[tuple[ModelInput, State]]
    end: State | Exception | None = None

    def moved(self, packing: float, unpacking: float) -> BatchBlock:
        """Return a copy with transfer times added to the ``MakingTimes`` of its batches.

        Args:
            packing: seconds to serialize the block in the reader process.
            unpacking: seconds to deserialize the block in the training process, added to the first
                batch.
        """
        moved, left = [], unpacking
        for model_input, position in self.batches:
            making = model_input.making.arrived(left)
            making = replace(making, transfer=making.transfer + packing / len(self.batches))
            moved.append((replace(model_input, making=making), position))
            left = 0.0
        return replace(self, batches=moved)


class TaskReader(ABC):
    """Reader of the batches of one rank, in blocks. Not thread-safe."""

    @abstractmethod
    def blocks(
        self, position: State, worker: int, num_workers: int
    ) -> Generator[BatchBlock, None, None]:
        """Yield the blocks ``worker``, ``worker + num_workers``, and so on from ``position``.

        The last block has an ``end``. Errors of data or plugins are stored in ``end``, not raised.
        """

    @abstractmethod
    def block(self, position: State, number: int) -> BatchBlock:
        """Return block ``number``, counted from ``position``. Every process gets the same block.

        Returns an empty block after the last block. If the dataset's reader does not override
        ``blocks``, all earlier batches are read too.
        """

    @abstractmethod
    def num_blocks(self, position: State) -> int | None:
        """Return the number of blocks up to the end of the epoch; None if unknown.

        Raises:
            DataError: the position was saved with other data.
        """


@dataclass(frozen=True)
class ReadTask:
    """Picklable description of the batches of one rank, from which any process can read.

    Attributes:
        rank, world_size, split: rank and split whose batches are read.
        folder: current directory of the trainer, for relative paths in options.
        modules: maps module names to plugin files. The files must exist at these paths.
        pickled: pickled function that accepts the task and returns a TaskReader.
    """

    rank: int
    world_size: int
    split: Split
    folder: Path
    modules: dict[str, Path]
    pickled: bytes

    def open(self) -> TaskReader:
        """Change to the trainer's current directory if it exists, and return the reader.

        Raises:
            ImportError: a plugin's module is missing or fails to import.
            DataError: the data is missing or wrong.
        """
        if self.folder.is_dir():
            os.chdir(self.folder)
        for name, file in self.modules.items():
            load_file(name, file)
        reader: TaskReader = pickle.loads(self.pickled)(self)
        return reader


class Ingestion(Plugin, ABC):
    """Plugin that runs readers in other processes or on other machines.

    The batches and their order must be the same as without the plugin.
    """

    kind: ClassVar[str] = "ingestion"

    def check(self) -> None:
        """Check that readers can run. Called before data is prepared. Raises SetupError if not."""

    @abstractmethod
    def open(self, task: ReadTask) -> Feed:
        """Return the source of batches for one rank and split.

        Every rank calls this method for the same splits in the same order. Several feeds may be
        open at the same time.

        Args:
            task: description of the reader. Pickle it to send it to another process.

        Raises:
            SetupError: readers cannot run.
        """


class Feed(ABC):
    """Context manager that receives the batches of one rank and split from readers."""

    @abstractmethod
    def read(self, reader: Reader) -> Iterator[ModelInput]:
        """Yield the batches from the position of ``reader`` to the end of the epoch, in order.

        ``reader`` only tracks the position. Call its ``load_state_dict`` before each batch, and
        move it to the next epoch at the end, for example with ``recd_plugins.api.hand_out``. The
        caller may stop an iteration early and start another one at any position.

        Raises:
            RecdError: a reader failed. Raised at the position of the failed batch.
            SetupError: readers died repeatedly.
        """

    def report(self) -> Mapping[str, float]:
        """Return a dict from metric name to value for the run report. Works after ``close``."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Stop the readers. May be called twice, and may cache resources for the next feed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
