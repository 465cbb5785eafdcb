"""Rows of Criteo's logs as they are stored: a label, 13 numbers, 26 ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LABEL = "label"
#: Names as in torchrec.datasets.criteo.
DENSE = tuple(f"int_{number}" for number in range(13))
SPARSE = tuple(f"cat_{number}" for number in range(26))
COLUMNS = (LABEL, *DENSE, *SPARSE)


@dataclass(frozen=True)
class RawRows:
    """Some rows, column by column.

    Attributes:
        labels: 0 or 1, int8 ``[num_rows]``.
        dense: 13 arrays ``[num_rows]``: int64 as logged, 0 where the log has nothing, or floats
            where files hold numbers that were transformed before.
        sparse: 26 arrays of ids, int64 ``[num_rows]``, 0 where the log has nothing.
    """

    labels: NDArray[np.int8]
    dense: Sequence[NDArray[Any]]
    sparse: Sequence[NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.labels)

    def slice(self, start: int, stop: int) -> RawRows:
        """Rows ``start`` to ``stop``, without a copy."""
        return RawRows(
            self.labels[start:stop],
            [column[start:stop] for column in self.dense],
            [column[start:stop] for column in self.sparse],
        )
