from __future__ import annotations

import numba
import numpy as np
import torch

from recd_plugin_dynamic.index.mix import bucket_of, bucket_width, mix, mix_one, unmix

EDGES = [0, 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1]


@numba.njit
def _mix_all(ids, out):
    for index in range(len(ids)):
        out[index] = mix_one(ids[index])


def test_numpy_torch_numba_and_python_agree():
    ids = np.concatenate([EDGES, np.random.default_rng(0).integers(0, 2**63 - 1, 10_000)])
    mixed, compiled = mix(ids), np.empty_like(ids)
    _mix_all(ids, compiled)
    assert mixed.min() >= 0
    np.testing.assert_array_equal(compiled, mixed)
    np.testing.assert_array_equal(mix(torch.from_numpy(ids)).numpy(), mixed)
    assert [mix(each) for each in ids.tolist()] == mixed.tolist()
    np.testing.assert_array_equal(unmix(mixed), ids)
    np.testing.assert_array_equal(unmix(torch.from_numpy(mixed)).numpy(), ids)


def test_buckets_of_consecutive_ids_are_uniform():
    for stride in (1, 1000, 2**32, 2**40):
        for num in (1, 3, 256):
            buckets = bucket_of(mix(np.arange(200_000 if stride < 2**40 else 2**20) * stride), num)
            found = np.bincount(buckets, minlength=num)
            assert len(found) == num
            expected = len(buckets) / num
            chi_square = ((found - expected) ** 2 / expected).sum()
            assert chi_square < num + 6 * (2 * num) ** 0.5
    assert bucket_of(np.array([2**63 - 1]), 3) == 2
    assert bucket_width(4) == 2**61
