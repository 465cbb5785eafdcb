from __future__ import annotations

import numpy as np
import pytest
import torch

from recd_plugin_scars.runtime.kernel import CachedEmbeddingBag
from recd_plugin_scars.runtime.policies import TableCache
from recd_plugin_scars.tests.runtime.kernels import batch_of, config_of, learn, state_of
from recd_plugins.runtime.errors import DataError
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.fake_cuda import fake_cuda, host_counts

BATCHES = [
    ([[1, 2], [3, 3]], [[0], [4, 1]]),
    ([[4], [0, 5]], [[2, 2], []]),
    ([[7, 1]] * 2, [[3]] * 2),
]


@pytest.mark.parametrize("policy", ["static", "lru"])
def test_trains_as_on_the_cpu(policy: str) -> None:
    expected = launch(_train, 1, "cpu", policy)[0]
    for one, other in zip(expected, launch(_train, 1, "cuda", policy)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def _train(rank: int, world_size: int, kind: str, policy: str) -> list[np.ndarray]:
    hot = np.arange(3)
    caches = {f"t{n}": TableCache(policy, 0.375, hot) for n in range(2)}  # type: ignore[arg-type]
    with fake_cuda() as cuda:
        device = cuda if kind == "cuda" else torch.device("cpu")
        torch.manual_seed(0)
        kernel = CachedEmbeddingBag(config_of([8, 8]), None, device, None, caches=caches)
        for number, ids in enumerate(BATCHES * 2):
            batch = batch_of(*ids).to(device)
            batch.length_per_key()
            with host_counts() as counts:
                kernel.prefetch(batch)
            # The thread that writes evicted rows may wait at any time.
            syncs = [e for e in counts if e.what == "sync" and "stores.py" not in e.place]
            waits = [e for e in syncs if "resize" not in e.place]
            assert len(waits) == (kind == "cuda"), waits
            learn(kernel(batch).cpu(), number)
        kernel.emb_module.bounds_check_mode_int = 3  # no check by FBGEMM
        with pytest.raises(DataError, match="id 9 is outside rows 0 to 7"):
            kernel(batch_of([[9]], [[1]]).to(device))
        return [each.numpy() for each in state_of(kernel)]
