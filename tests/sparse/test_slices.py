import numpy as np
import torch

from recd_plugins.sparse.jagged import adjacent_runs, tensors_of


def test_slices_of_one_array_are_one_tensor_again():
    array = np.arange(10)
    parts = tensors_of([array[1:3], array[3:3], array[3:7]])
    assert [part.tolist() for part in parts] == [[1, 2], [], [3, 4, 5, 6]]
    ((count, together),) = adjacent_runs(parts)
    assert (count, together.tolist()) == (3, [1, 2, 3, 4, 5, 6])
    array[1] = 11
    assert together[0] == parts[0][0] == 11, "nothing is copied"


def test_runs_end_where_memory_does():
    one, other = np.arange(10), np.arange(10)
    assert [part.tolist() for part in tensors_of([one[::3], one[1:3]])] == [[0, 3, 6, 9], [1, 2]]
    arrays = [one[:2], one[2:5], one[5:5], other[:3], one[5:6], other[6:9], other[9:], other[8:]]
    parts = tensors_of(arrays)
    assert [part.tolist() for part in parts] == [array.tolist() for array in arrays]
    runs = adjacent_runs(parts)
    assert [count for count, _ in runs] == [3, 1, 1, 2, 1]
    assert [run.tolist() for _, run in runs] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2],
        [5],
        [6, 7, 8, 9],
        [8, 9],
    ]
    assert adjacent_runs([]) == []
    whole = torch.arange(10)
    runs = adjacent_runs([whole[0:4:2], whole[4:6]])
    assert [(count, run.tolist()) for count, run in runs] == [(1, [0, 2]), (1, [4, 5])]
    runs = adjacent_runs([whole[:0], whole[:2], whole[2:3]])
    assert [(count, run.tolist()) for count, run in runs] == [(1, []), (2, [0, 1, 2])]
