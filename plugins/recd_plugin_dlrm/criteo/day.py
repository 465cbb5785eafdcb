"""What every format of Criteo's files offers: rows of one day, from any row on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recd_plugin_dlrm.criteo.rows import RawRows
from recd_plugins.api import Origin

#: Rows that are read at once where files have no units of their own.
UNIT_ROWS = 16_384


@dataclass(frozen=True)
class Stretch:
    """``num_rows`` adjacent rows of a day, within one of its units."""

    first_row: int
    num_rows: int


class Day(ABC):
    """Rows of one file or set of files, in order.

    Attributes:
        name: for messages and for the state of a reader: ``day_0``, ``train``.
        starts: the first row of each unit, int64 ``[num_units]``; reading may begin at one.
        num_rows: of all units, at least 1.
        can_jump: whether reading may begin anywhere at no cost, which shuffling takes.
    """

    name: str
    starts: NDArray[np.int64]
    num_rows: int
    can_jump: bool = True

    @abstractmethod
    def identity(self) -> list[Any]:
        """What tells these rows from others, JSON values; equal wherever the files lie."""

    def contents(self) -> dict[str, Any]:
        """What tells this day from another of as many rows; as quick to know as ``identity``."""
        return {"rows": self.identity()}

    def provenance(self) -> list[Any]:
        """``identity``, and what else a dictionary of these ids is known by; JSON values."""
        return self.identity()

    @abstractmethod
    def read(
        self, stretches: Iterable[Stretch]
    ) -> Generator[tuple[RawRows, tuple[Origin, ...]], None, None]:
        """The rows of stretches, each in one part or several, and where they came from.

        Raises:
            DataError: files are damaged, or were replaced after this object was made.
        """

    def stretches(self, first_row: int, stop_row: int) -> list[Stretch]:
        """The rows from ``first_row`` to ``stop_row``, cut where units begin."""
        inside = self.starts[(self.starts > first_row) & (self.starts < stop_row)].tolist()
        edges = [first_row, *inside, stop_row]
        return [Stretch(start, stop - start) for start, stop in pairwise(edges) if start < stop]


def even_starts(num_rows: int) -> NDArray[np.int64]:
    """Units of ``UNIT_ROWS`` rows."""
    return np.arange(0, num_rows, UNIT_ROWS, dtype=np.int64)
