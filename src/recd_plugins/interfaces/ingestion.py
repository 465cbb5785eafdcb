"""Kind ``ingestion``: makes the batches of a rank outside its trainer."""

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
    """Adjacent batches, each with the position after it.

    Attributes:
        number: 0-based from the position at which reading started.
        batches: any number.
        end: None if more may follow, the position at the end of the epoch, or the error after
            ``batches``.
    """

    number: int
    batches: list[tuple[ModelInput, State]]
    end: State | Exception | None = None

    def moved(self, packing: float, unpacking: float) -> BatchBlock:
        """Return the block with its transfer times.

        Args:
            packing: seconds for the block in the process that made it.
            unpacking: seconds for the block in the trainer; counted for the first batch.
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

        The last has an ``end``: the position at the end of the epoch, or an error of data or a
        plugin, which is never raised.
        """

    @abstractmethod
    def block(self, position: State, number: int) -> BatchBlock:
        """Return block ``number`` from ``position``, the same in any process at any time.

        After the last block it is empty, with the position at the end of the epoch. If the reader
        of the dataset does not override ``blocks``, all batches before it are read too.
        """

    @abstractmethod
    def num_blocks(self, position: State) -> int | None:
        """Return the blocks from ``position`` to the end of the epoch, None if unknown.

        Raises:
            DataError: the position is of other data.
        """


@dataclass(frozen=True)
class ReadTask:
    """Everything a reader needs besides the position. Small, and pickled as it is.

    Attributes:
        rank, world_size, split: the share of a split to read.
        folder: the trainer's current folder, for relative paths in options.
        modules: files of a plugin folder by module name, which must exist at the same paths.
        pickled: a function from the task to its reader.
    """

    rank: int
    world_size: int
    split: Split
    folder: Path
    modules: dict[str, Path]
    pickled: bytes

    def open(self) -> TaskReader:
        """Return the reader of this process, after moving to the trainer's folder if it exists.

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
    """Runs readers apart from the trainer, in other processes or on other machines.

    Batches, their order and positions are those of a rank that reads by itself.
    """

    kind: ClassVar[str] = "ingestion"

    def check(self) -> None:
        """Check before data is prepared whether this can run.

        Raises:
            SetupError: says what is missing and what to do.
        """

    @abstractmethod
    def open(self, task: ReadTask) -> Feed:
        """Return a feed of one rank and split; a rank may have several open, of several splits.

        Every rank calls it for the same splits in the same order.

        Args:
            task: everything a reader needs; pickle it to another process.

        Raises:
            SetupError: there is nothing to run readers on; says what to do.
        """


class Feed(ABC):
    """Batches of one rank and split that are made elsewhere; a context that closes it."""

    @abstractmethod
    def read(self, reader: Reader) -> Iterator[ModelInput]:
        """Yield the batches from the position of ``reader`` to the end of the epoch, in order.

        ``reader`` reads nothing. Before a batch is handed out, ``load_state_dict`` moves it to the
        position after the batch, at the end to the next epoch; ``recd_plugins.api.hand_out`` does
        that. An iteration may be left early and restarted at any position.

        Raises:
            RecdError: an error of a reader, at its batch.
            SetupError: readers died repeatedly.
        """

    def report(self) -> Mapping[str, float]:
        """Return figures by name for ``recd run --json``, also after ``close``."""
        return {}

    def close(self) -> None:  # noqa: B027
        """End what ``open`` and ``read`` started; may be called twice.

        Resources that the next feed of this process would need may stay until the process ends.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
