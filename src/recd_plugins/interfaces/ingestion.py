"""Plugin kind ``ingestion``: makes the batches of a rank outside its trainer."""

from __future__ import annotations

import os
import pickle
import platform
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from recd_plugins.interfaces.dataset import Reader, Split
from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.runtime.errors import PluginError
from recd_plugins.runtime.plugin_modules import load_file

if TYPE_CHECKING:
    from recd_plugins.interfaces.batch import ModelInput

#: A position: JSON values of ``Reader.state_dict``.
State = dict[str, Any]


@dataclass(frozen=True)
class BatchBlock:
    """Adjacent batches.

    Attributes:
        number: 0-based, from the position at which reading started.
        batches: batches, each with the position after it.
        end: the position at the end of the epoch, the error after ``batches``, or None if more
            blocks may follow.
    """

    number: int
    batches: list[tuple[ModelInput, State]]
    end: State | Exception | None = None

    def moved(self, packing: float, unpacking: float) -> BatchBlock:
        """Add transfer times.

        Args:
            packing: seconds for the block in the reader process.
            unpacking: seconds for the block in the trainer, counted for the first batch.
        """
        moved, left = [], unpacking
        for model_input, position in self.batches:
            making = model_input.making.transferred(packing / len(self.batches)).arrived(left)
            moved.append((replace(model_input, making=making), position))
            left = 0.0
        return replace(self, batches=moved)


class TaskReader(ABC):
    """Makes blocks of batches; one thread uses it at a time."""

    @abstractmethod
    def blocks(
        self, position: State, worker: int, num_workers: int
    ) -> Generator[BatchBlock, None, None]:
        """Yield the blocks ``worker``, ``worker + num_workers``, and so on from ``position``.

        The last block has an ``end``. Errors of data or plugins are stored there, not raised.
        """

    @abstractmethod
    def block(self, position: State, number: int) -> BatchBlock:
        """Return block ``number`` from ``position``, the same in any process.

        After the last block it is empty. If the dataset's reader does not override ``blocks``, all
        batches before it are read too.
        """

    @abstractmethod
    def num_blocks(self, position: State) -> int | None:
        """Return the number of blocks to the end of the epoch, None if unknown.

        Raises:
            DataError: the position belongs to other data.
        """


@dataclass(frozen=True)
class ReadTask:
    """Picklable description of a reader, without its position.

    Attributes:
        rank, world_size, split: share of a split to read.
        folder: the trainer's current folder, for relative paths in options.
        modules: plugin files by module name, which must exist at the same paths.
        pickled: function from the task to its reader.
    """

    rank: int
    world_size: int
    split: Split
    folder: Path
    modules: dict[str, Path]
    pickled: bytes

    def open(self) -> TaskReader:
        """Return the reader of this process; changes to the trainer's folder if it exists.

        Raises:
            PluginError: a plugin's module is missing or fails to import.
            DataError: the data is missing or wrong.
        """
        if self.folder.is_dir():
            os.chdir(self.folder)
        for name, file in self.modules.items():
            load_file(name, file)
        try:
            reader_of = pickle.loads(self.pickled)
        except (ImportError, AttributeError) as error:
            raise PluginError(
                f"a reader in {platform.node()} lacks a plugin of the trainer: {error}; install "
                "the same distributions there"
            ) from error
        reader: TaskReader = reader_of(self)
        return reader


class Ingestion(Plugin, ABC):
    """Runs readers in other processes or on other machines.

    Batches, order and positions equal those of a rank that reads by itself.
    """

    kind: ClassVar[str] = "ingestion"

    def check(self) -> None:
        """Check before data is prepared that readers can run; SetupError if not."""

    @abstractmethod
    def open(self, task: ReadTask) -> Feed:
        """Return the feed of one rank and split.

        Every rank calls it for the same splits in the same order; several may be open.

        Args:
            task: description of the reader, to pickle to another process.

        Raises:
            SetupError: readers cannot run.
        """


class Feed(ABC):
    """Batches of one rank and split from readers elsewhere; a context manager."""

    @abstractmethod
    def read(self, reader: Reader) -> Iterator[ModelInput]:
        """Yield the batches from the position of ``reader`` to the end of the epoch, in order.

        ``reader`` only holds the position: move it with ``load_state_dict`` before each batch, at
        the end to the next epoch, as ``hand_out`` of ``recd_plugins.api`` does. An iteration may be
        left early and restarted at any position.

        Raises:
            RecdError: an error of a reader, at its batch.
            SetupError: readers died repeatedly.
        """

    def report(self) -> Mapping[str, float]:
        """Return figures by name for the report, also after ``close``."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Stop the readers. May be called twice; resources for the next feed may stay."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
