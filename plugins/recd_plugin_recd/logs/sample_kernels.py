"""The inner loop of the row-wise form."""

from __future__ import annotations

import numba as nb
import numpy as np
from numpy.typing import NDArray


@nb.njit(cache=True, nogil=True)
def copy_segments(
    source: NDArray[np.uint8],
    source_starts: NDArray[np.int64],
    target: NDArray[np.uint8],
    target_starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> None:
    """Copy ``lengths[i]`` bytes from ``source_starts[i]`` to ``target_starts[i]`` for every i."""
    for i in range(len(lengths)):
        start, end = source_starts[i], target_starts[i]
        for j in range(lengths[i]):
            target[end + j] = source[start + j]
