"""Keys are found where they are in a list, and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recd_plugin_flexshard.runtime.split import Places

CPU = torch.device("cpu")
KEYS = st.integers(-2, 40) | st.integers(-1, 2**62)


@given(st.lists(KEYS, unique=True, max_size=60), st.lists(KEYS, max_size=60))
def test_keys_are_found_at_their_places_and_others_nowhere(
    keys: list[int], others: list[int]
) -> None:
    places = Places(np.array(keys, dtype=np.int64), CPU)
    wanted = keys + others
    expected = [keys.index(key) if key in keys else -1 for key in wanted]
    assert places.find(torch.tensor(wanted, dtype=torch.int64)).tolist() == expected


@pytest.mark.parametrize("step", [1, 2, 64, 4096, 2**20, 1_000_003])
def test_regular_keys_have_few_in_a_bucket(step: int) -> None:
    keys = np.arange(100_000, dtype=np.int64) * step
    places = Places(keys, CPU)
    assert places._most <= 16
    assert torch.equal(places.find(torch.from_numpy(keys)), torch.arange(len(keys)))
    assert places.nbytes < 17 * len(keys)
