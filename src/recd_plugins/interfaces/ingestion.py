"""Kind ``ingestion``: who makes the batches of a rank, where its trainer does not itself."""

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
    end: State | Exception | None = None

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


class TaskReader(ABC):
    """Makes blocks of batches; one thread uses it at a time."""

    @abstractmethod
    def blocks(
        self, position: State, worker: int, num_workers: int
    ) -> Generator[BatchBlock, None, None]:
        """The blocks ``worker``, ``worker + num_workers``, and so on from ``position`` on.

        What is last has an ``end``: the position at the end of the epoch, or an error. Errors of
        data and plugins are handed out so, never raised.
        """

    @abstractmethod
    def block(self, position: State, number: int) -> BatchBlock:
        """The block ``number`` from ``position`` on, the same in any process and at any time.

        Behind the last block is one without batches, with the position at the end of the epoch. A
        dataset whose reader overrides ``blocks`` reads that block alone; one that only iterates
        reads all batches before it too.
        """

    @abstractmethod
    def num_blocks(self, position: State) -> int | None:
        """Blocks from ``position`` to the end of the epoch; None where that shows by reading only.

        Raises:
            DataError: the position is of other data.
        """


@dataclass(frozen=True)
class ReadTask:
    """All that a reader has to know, but the position. Small, and pickled as it is.

    Attributes:
        rank, world_size, split: whose share of which split.
        folder: the trainer's current folder, which relative paths in options are relative to.
        modules: files of a folder of plugins by the name of their module; a reader needs them at
            the same place.
        pickled: what makes the reader of a task.
    """

    rank: int
    world_size: int
    split: Split
    folder: Path
    modules: dict[str, Path]
    pickled: bytes

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
            reader_of = pickle.loads(self.pickled)
        except (ImportError, AttributeError) as error:
            raise PluginError(
                f"a reader in {platform.node()} lacks a plugin of the trainer: {error}; install "
                "the same distributions there"
            ) from error
        reader: TaskReader = reader_of(self)
        return reader


class Ingestion(Plugin, ABC):
    """Runs readers apart from the trainer: in other processes, or on other machines.

    Who reads changes nothing of what is read: the batches and positions are those of a rank that
    reads by itself, in the same order.
    """

    kind: ClassVar[str] = "ingestion"

    def check(self) -> None:
        """Refuse to start where this cannot run. Called before data is prepared for training.

        Raises:
            SetupError: says what is missing and what to do.
        """

    @abstractmethod
    def open(self, task: ReadTask) -> Feed:
        """What feeds one rank from one split; a rank may have several open, of several splits.

        Every rank calls it for the same splits in the same order.

        Args:
            task: all that a reader has to know; pickle it to another process.

        Raises:
            SetupError: there is nothing to run readers on; says what to do.
        """


class Feed(ABC):
    """Batches of one rank from one split, made elsewhere. Left as a context, it is closed."""

    @abstractmethod
    def read(self, reader: Reader) -> Iterator[ModelInput]:
        """The batches from the position of ``reader`` to the end of the epoch, in order.

        ``reader`` is moved along by ``load_state_dict``, to the position after each batch before it
        is handed out and at the end to the start of the next epoch: ``hand_out`` of
        ``recd_plugins.api`` does it. It reads nothing itself. An iteration may be left
        early, and a new one started at any position.

        Raises:
            RecdError: what a reader raised, at its batch.
            SetupError: readers died again and again.
        """

    def report(self) -> Mapping[str, float]:
        """Figures by name, for ``recd run --json``: readers, bytes received and the like.

        It may be asked for when the feed is closed.
        """
        return {}

    def close(self) -> None:  # noqa: B027
        """End what ``open`` and ``read`` started. A second call does nothing.

        What the next feed of this process would start again may stay until the process ends.
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
