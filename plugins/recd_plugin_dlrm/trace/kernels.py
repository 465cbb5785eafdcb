"""The inner loops of Algorithms 1 and 2: an LRU stack on a Fenwick tree, O(log n) an access.

A stack gives each access the next position of an array; what stands at a position is the code of
an id, from 0 in the order of first use, or -1 where it was accessed again later. The tree counts
the positions that hold one. The newest access stands at the end, so the id at depth d from the top
is the d-th occupied position from the end.
"""

from __future__ import annotations

import numba as nb
import numpy as np
from numpy.typing import NDArray

from recd_plugin_dlrm.draws import draw, mix

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]


@nb.njit(cache=True, nogil=True)
def code_ids(
    ids: Int64s, keys: Int64s, codes: Int32s, unique: Int64s, num: int, out: Int32s
) -> int:
    """Codes of ids, which new ones are given in their order; how many ids there are then.

    Args:
        ids: int64 ``[n]``.
        keys, codes: a hash table whose size is a power of two; a code of -1 is an empty place.
        unique: ids by code, with room for ``n`` more.
        num: ids that are known.
        out: int32 ``[n]``, written.
    """
    mask = nb.uint64(len(keys) - 1)
    for i in range(len(ids)):
        key = ids[i]
        place = mix(nb.uint64(key)) & mask
        while codes[place] >= 0 and keys[place] != key:
            place = (place + nb.uint64(1)) & mask
        if codes[place] < 0:
            keys[place] = key
            codes[place] = num
            unique[num] = key
            num += 1
        out[i] = codes[place]
    return num


@nb.njit(cache=True, nogil=True)
def insert_ids(unique: Int64s, num: int, keys: Int64s, codes: Int32s) -> None:
    """Fill an empty hash table with the first ``num`` ids of ``unique``."""
    mask = nb.uint64(len(keys) - 1)
    for code in range(num):
        place = mix(nb.uint64(unique[code])) & mask
        while codes[place] >= 0:
            place = (place + nb.uint64(1)) & mask
        keys[place] = unique[code]
        codes[place] = code


@nb.njit(cache=True, nogil=True)
def compact(at: Int32s, used: int, last: Int32s, new_tree: Int32s, new_at: Int32s) -> int:
    """Move a stack into new arrays without the positions that are free; positions used then."""
    live = 0
    for position in range(1, used + 1):
        code = at[position]
        if code >= 0:
            live += 1
            new_at[live] = code
            last[code] = live
    for position in range(1, len(new_tree)):
        new_tree[position] += position <= live
        parent = position + (position & -position)
        if parent < len(new_tree):
            new_tree[parent] += new_tree[position]
    return live


@nb.njit(cache=True, nogil=True)
def _add(tree: Int32s, position: int, change: int) -> None:
    while position < len(tree):
        tree[position] += change
        position += position & -position


@nb.njit(cache=True, nogil=True)
def _sum_to(tree: Int32s, position: int) -> int:
    total = 0
    while position > 0:
        total += tree[position]
        position -= position & -position
    return total


@nb.njit(cache=True, nogil=True)
def _find(tree: Int32s, rank: int) -> int:
    """The position of the ``rank``-th one, from 1; the tree's size is a power of two and one."""
    position, step = 0, len(tree) - 1
    while step:
        ahead = position + step
        if ahead < len(tree) and tree[ahead] < rank:
            position = ahead
            rank -= tree[ahead]
        step >>= 1
    return position + 1


@nb.njit(cache=True, nogil=True)
def stack_distances(
    codes: Int32s,
    out: Int64s,
    counts: Int64s,
    tree: Int32s,
    at: Int32s,
    last: Int32s,
    state: Int64s,
) -> int:
    """Algorithm 1: distances of accesses until the stack's positions are used up; how many.

    Args:
        codes: int32 ``[n]``.
        out: int64 ``[n]``, written.
        counts: accesses by distance, added to.
        tree, at, last: of the stack; ``last`` is the position of a code, 0 where it is new.
        state: int64 ``[2]``: positions used, and ids in the stack.
    """
    used, live = state[0], state[1]
    done = 0
    while done < len(codes) and used < len(at) - 1:
        code = codes[done]
        before = last[code]
        distance = 0
        if before == used and before > 0:
            distance = 1
        else:
            if before > 0:
                distance = live - _sum_to(tree, before - 1)
                _add(tree, before, -1)
                at[before] = -1
            else:
                live += 1
            used += 1
            at[used] = code
            last[code] = used
            _add(tree, used, 1)
        out[done] = distance
        counts[distance] += 1
        done += 1
    state[0], state[1] = used, live
    return done


@nb.njit(cache=True, nogil=True)
def replay(out: Int32s, distances: Int64s, tree: Int32s, at: Int32s, state: Int64s) -> int:
    """The codes that accesses with these distances have, until positions are used up; how many.

    No distance is deeper than the stack is by then.
    """
    used, live = state[0], state[1]
    done = 0
    while done < len(out) and used < len(at) - 1:
        out[done], used, live = _access(distances[done], tree, at, used, live)
        done += 1
    state[0], state[1] = used, live
    return done


@nb.njit(cache=True, nogil=True)
def _access(distance: int, tree: Int32s, at: Int32s, used: int, live: int) -> tuple[int, int, int]:
    """Code, positions used and ids in the stack after one access."""
    if distance == 1:
        return at[used], used, live
    if distance == 0:
        code = live
        live += 1
    else:
        position = _find(tree, live - distance + 1)
        code = at[position]
        _add(tree, position, -1)
        at[position] = -1
    used += 1
    at[used] = code
    _add(tree, used, 1)
    return code, used, live


@nb.njit(cache=True, nogil=True)
def generate(
    out: Int32s,
    num_ids: int,
    distances: Int64s,
    cumulative: Float64s,
    counts: Int64s,
    seed: int,
    tree: Int32s,
    at: Int32s,
    state: Int64s,
) -> int:
    """Algorithm 2: draw accesses until the stack's positions are used up; how many.

    Args:
        out: int32 ``[n]``, codes, written.
        num_ids: that there are; the ids not yet out come in the order of their codes.
        distances: int64 ``[k]``, rising, the first is 0.
        cumulative: float64 ``[k]``: sums of their weights.
        counts: int64 ``[k]``: accesses by distance, added to.
        seed: of the draws: access i has the same one however many are drawn at once.
        state: int64 ``[4]``: positions used, ids in the stack, distances within reach, accesses
            drawn so far.
    """
    used, live, reach, drawn = state[0], state[1], state[2], state[3]
    stream = mix(nb.uint64(seed))
    done = 0
    while done < len(out) and used < len(at) - 1:
        while reach < len(distances) and distances[reach] <= live:
            reach += 1
        low = 1 if live == num_ids else 0
        base = cumulative[0] if low else 0.0
        point = base + draw(stream, drawn) * (cumulative[reach - 1] - base)
        high = reach - 1
        while low < high:
            middle = (low + high) >> 1
            if cumulative[middle] > point:
                high = middle
            else:
                low = middle + 1
        counts[low] += 1
        out[done], used, live = _access(distances[low], tree, at, used, live)
        done += 1
        drawn += 1
    state[0], state[1], state[2], state[3] = used, live, reach, drawn
    return done


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
