"""Lines of Criteo's TSV to numbers, in one pass over their bytes."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_TAB, _LINE_FEED, _RETURN, _MINUS = 9, 10, 13, 45
# More might not fit into int64.
_MOST_DIGITS, _MOST_HEX_DIGITS = 18, 15
#: Of each byte the hexadecimal digit, 255 where it is none.
_HEX = np.full(256, 255, np.uint8)
_HEX[ord("0") : ord("9") + 1] = np.arange(10)
_HEX[ord("a") : ord("f") + 1] = _HEX[ord("A") : ord("F") + 1] = np.arange(10, 16)


@njit(cache=True, nogil=True)
def parse_lines(
    data: NDArray[np.uint8],
    start: int,
    stop: int,
    labels: NDArray[np.int8],
    dense: NDArray[np.int64],
    sparse: NDArray[np.int64],
    first: int,
) -> tuple[int, int, bool]:
    """Parse the lines of ``data[start:stop]`` into rows from ``first`` on.

    Parsing stops at a malformed line, and at the ``[capacity]`` of ``labels``.

    Returns:
        The next row, the start of the next line, and whether that line is malformed.
    """
    row, position = first, start
    capacity = len(labels)
    while row < capacity and position < stop:
        at = position
        label = np.int64(data[at]) - 48
        if not 0 <= label <= 1 or data[at + 1] != _TAB:
            return row, position, True
        labels[row] = label
        at += 2
        for column in range(13):
            negative = data[at] == _MINUS
            at += negative
            begin = at
            number = np.int64(0)
            digit = np.int64(data[at]) - 48
            while 0 <= digit <= 9:
                number = number * 10 + digit
                at += 1
                digit = np.int64(data[at]) - 48
            digits = at - begin
            if data[at] != _TAB or digits > _MOST_DIGITS or (negative and digits == 0):
                return row, position, True
            dense[column, row] = -number if negative else number
            at += 1
        for column in range(26):
            begin = at
            number = np.int64(0)
            digit = np.int64(_HEX[data[at]])
            while digit < 16:
                number = (number << 4) | digit
                at += 1
                digit = np.int64(_HEX[data[at]])
            if at - begin > _MOST_HEX_DIGITS:
                return row, position, True
            sparse[column, row] = number
            if column < 25:
                if data[at] != _TAB:
                    return row, position, True
            else:
                if data[at] == _RETURN:
                    at += 1
                if data[at] != _LINE_FEED:
                    return row, position, True
            at += 1
        row += 1
        position = at
    return row, position, False
