import numba
import numpy as np
import pytest

from recd_plugins.sparse.overlap import first_difference, int32_at

u64 = np.uint64


@numba.njit
def run_first_difference(address, start, back, end):
    return first_difference(int32_at(address), u64(start), u64(back), u64(end))


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 130, 200])
def test_a_difference_is_found_wherever_it_is(length):
    row = np.arange(length, dtype=np.int32)
    for back_extra in (0, 7, 70):
        words = np.concatenate([row, np.full(back_extra, -1, np.int32), row])
        start, back, end = length + back_extra, length + back_extra, len(words)
        for at in range(length):
            words[start + at] ^= 1
            assert run_first_difference(address(words), start, back, end) == start + at
            words[start + at] ^= 1
        assert run_first_difference(address(words), start, back, end) == end
