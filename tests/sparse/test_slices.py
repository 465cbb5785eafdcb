import numpy as np
import torch

from recd_plugins.sparse.jagged import joined, tensors_of


def test_slices_of_one_array_are_joined_without_a_copy():
    array = np.arange(10)
    parts = tensors_of([array[1:3], array[3:3], array[3:7]])
    assert [part.tolist() for part in parts] == [[1, 2], [], [3, 4, 5, 6]]
    together = joined(parts)
    assert together.tolist() == [1, 2, 3, 4, 5, 6]
    array[1] = 11
    assert together[0] == parts[0][0] == 11, "nothing is copied"
    whole = torch.arange(10)
    assert joined([whole[:0], whole[:2], whole[2:3]]).tolist() == [0, 1, 2]
    assert joined([whole[:0], whole[:0]]).tolist() == []


def test_other_tensors_are_copied():
    one, other = np.arange(10), np.arange(10)
    assert [part.tolist() for part in tensors_of([one[::3], one[1:3]])] == [[0, 3, 6, 9], [1, 2]]
    arrays = [one[:2], one[2:5], one[5:5], other[:3], one[5:6], other[6:9], other[9:], other[8:]]
    parts = tensors_of(arrays)
    assert [part.tolist() for part in parts] == [array.tolist() for array in arrays]
    assert joined(parts).tolist() == np.concatenate(arrays).tolist()
    whole = torch.arange(10)
    assert joined([whole[0:4:2], whole[4:6]]).tolist() == [0, 2, 4, 5]
