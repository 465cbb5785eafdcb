"""The inner loops of Algorithms 1 and 2: an LRU stack on a Fenwick tree, O(log n) an access.

Each access takes the next position of an array, which holds the code of its id, or -1 after a later
access to it. The tree counts occupied positions: the id at depth d is the d-th one from the end.
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
    """Write the codes of ids to ``out``, new ones in their order, and return the number of ids.

    ``keys`` and ``codes`` are a hash table of a power of two places, -1 for an empty one;
    ``unique`` has the ids by code, with room for new ones.
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
    """Move a stack into new arrays without free positions, and return the positions used."""
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
    """Return the position of the ``rank``-th occupied one, from 1."""
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
    """Algorithm 1: write distances until positions are used up, and return how many.

    ``last`` is the position of a code, 0 for a new one. ``state`` has positions used and ids in the
    stack.
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
    """Algorithm 2: draw codes until positions are used up, and return how many.

    ``distances`` rise from 0, with the sums of their weights in ``cumulative``. New ids come in the
    order of their codes. ``state`` has positions used, ids in the stack, distances within reach and
    accesses drawn.
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
