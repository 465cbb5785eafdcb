"""Numbers of a text, in one pass over its bytes."""

from __future__ import annotations

import numba as nb
import numpy as np
from numpy.typing import NDArray

#: What ``parse_ids`` found at the byte where it stopped.
FINE, NO_NUMBER, TOO_LARGE, OTHER_COLUMNS = range(4)

_LARGEST = np.int64(2**63 - 1)


@nb.njit(cache=True, nogil=True)
def parse_ids(
    text: NDArray[np.uint8], columns: int, out: NDArray[np.int64]
) -> tuple[int, int, int]:
    """Whole numbers between white space.

    Args:
        text: uint8 ``[n]``, which ends where a number ends.
        columns: numbers of each line that has some; 0 takes any.
        out: int64, written; room for ``(n + 1) / 2``.

    Returns:
        How many numbers; what is wrong; and at which byte.
    """
    num, in_line, place = 0, 0, 0
    while place < len(text):
        byte = text[place]
        if byte == 32 or 9 <= byte <= 13:
            if byte == 10:
                if columns and in_line and in_line != columns:
                    return num, OTHER_COLUMNS, place
                in_line = 0
            place += 1
            continue
        start = place
        negative = byte == 45
        if negative:
            place += 1
        value, digits = np.int64(0), 0
        while place < len(text) and not (text[place] == 32 or 9 <= text[place] <= 13):
            digit = np.int64(text[place]) - 48
            if digit < 0 or digit > 9:
                return num, NO_NUMBER, start
            if value > (_LARGEST - digit) // 10:
                return num, TOO_LARGE, start
            value = value * 10 + digit
            digits += 1
            place += 1
        if digits == 0:
            return num, NO_NUMBER, start
        out[num] = -value if negative else value
        num += 1
        in_line += 1
    if columns and in_line and in_line != columns:
        return num, OTHER_COLUMNS, len(text) - 1
    return num, FINE, len(text)
