import numpy as np
import pytest
import torch

from recd_plugin_recd.preprocessing import SigridHash
from recd_plugin_recd.preprocessing.kernels import hash_ids as hash_on_cpu
from recd_plugin_recd.preprocessing.modules import sigrid_hash as hash_by_torch

MASK = 2**64 - 1
LARGEST = 2**63 - 1


def reference(number: int, salt: int, buckets: int) -> int:
    """sigrid_hash in Python's integers."""
    key = number & MASK
    key = (~key + (key << 21)) & MASK
    key ^= key >> 24
    key = key * 265 & MASK
    key ^= key >> 14
    key = key * 21 & MASK
    key ^= key >> 28
    key = (key + (key << 31)) & MASK
    city = 0x9DDFEA08EB382D69
    first = ((key ^ salt & MASK) * city) & MASK
    first ^= first >> 47
    second = ((first ^ salt & MASK) * city) & MASK
    second ^= second >> 47
    hashed = second * city & MASK
    return (hashed - 2**64 if hashed > LARGEST else hashed) % buckets


def test_gives_what_torcharrow_documents():
    """The example of https://docs.pytorch.org/torcharrow/main, functional.sigrid_hash."""
    plugin = SigridHash(SigridHash.Options(buckets=100))
    values, offsets = torch.tensor([1, 2, 3, 5, 8, 10, 11]), torch.tensor([0, 3, 3, 7])
    hashed, same = plugin.transform(values, offsets)
    assert hashed.tolist() == [60, 54, 54, 4, 67, 2, 25]
    assert same.tolist() == offsets.tolist()


@pytest.mark.parametrize(
    "buckets", [1, 2, 3, 100, 2**20, 10**9 + 7, 2**31 - 1, 2**31, 2**31 + 1, 2**48 - 1, 2**48]
)
@pytest.mark.parametrize("salt", [0, 1, -1, LARGEST])
def test_kernel_and_torch_agree_with_the_definition(buckets, salt):
    random = np.random.default_rng(buckets).integers(-(2**63), LARGEST, 500).tolist()
    ids = [0, 1, -1, LARGEST, -LARGEST - 1, *random]
    expected = [reference(number, salt, buckets) for number in ids]
    assert hash_on_cpu(torch.tensor(ids), salt, buckets).tolist() == expected
    assert hash_by_torch(torch.tensor(ids), salt, buckets).tolist() == expected
