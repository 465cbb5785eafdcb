"""Kind ``ingestion``: who makes the batches of a rank, where its trainer does not itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from recd_plugins.interfaces.dataset import Reader
from recd_plugins.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from recd_plugins.interfaces.read_task import ReadTask
    from recd_plugins.values.batch import ModelInput


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
