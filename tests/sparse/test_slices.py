import numpy as np
import torch

from recd_plugins.sparse.slices import adjacent, tensors_of


def test_slices_of_one_array_are_one_tensor_again():
    array = np.arange(10)
    parts = tensors_of([array[1:3], array[3:3], array[3:7]])
    assert [part.tolist() for part in parts] == [[1, 2], [], [3, 4, 5, 6]]
    together = adjacent(parts)
    assert together is not None
    assert together.tolist() == [1, 2, 3, 4, 5, 6]
    array[1] = 11
    assert together[0] == parts[0][0] == 11, "nothing is copied"


def test_arrays_that_own_their_memory_become_tensors_one_by_one():
    arrays = [np.arange(2), np.arange(3)]
    parts = tensors_of(arrays)
    assert [part.tolist() for part in parts] == [[0, 1], [0, 1, 2]]
    assert adjacent(parts) is None
    assert tensors_of([]) == []


def test_a_gap_another_order_or_a_stride_is_not_adjacent():
    whole = torch.arange(10)
    assert adjacent([whole[:2], whole[3:5]]) is None
    assert adjacent([whole[2:4], whole[:2]]) is None
    assert adjacent([whole[::2]]) is None
    assert adjacent([whole[2:4]]).tolist() == [2, 3]
