"""Interface of a stream's source, which reads chunks of rows of several partitions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_streaming.ranges import Left, Positions, Ranges


@dataclass(frozen=True)
class Chunk:
    """Adjacent rows of one partition or file.

    Attributes:
        partition: name of the partition or file.
        rows: the valid rows.
        offsets: ascending offsets of the rows, int64 ``[num_rows]``.
        until: offset after the last row that was read, valid or not.
        after: offset ranges of the partition that this rank reads after this chunk.
    """

    partition: str
    rows: pa.RecordBatch
    offsets: NDArray[np.int64]
    until: int
    after: Ranges


class Source(ABC):
    """One rank's share of a stream. ``start`` is called first, and ``close`` last.

    Attributes:
        what: description for messages, such as the topic.
    """

    what: str

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    @abstractmethod
    def start(self, positions: Positions | None) -> Mapping[str, Left]:
        """Connect, and move to ``positions``; None starts a new run.

        Returns:
            The rows left of each partition or file that was started and is not finished.

        Raises:
            DataError: the stream or a position does not exist (any more).
        """

    @abstractmethod
    def chunks(self) -> Iterator[Chunk | None]:
        """Yield chunks in order, or None if there was nothing new for a moment."""

    @abstractmethod
    def lag(self, positions: Positions, done: Container[str]) -> int:
        """Return the number of existing rows after ``positions``, except in partitions ``done``."""

    def close(self) -> None:  # noqa: B027
        """Close connections."""

    @abstractmethod
    def position_of(self, states: Sequence[Positions]) -> Positions:
        """Return where this rank resumes, given the saved positions of any number of ranks."""

    @abstractmethod
    def place_of(self, partition: str, offset: int) -> str:
        """Return where a row comes from, for error messages."""
