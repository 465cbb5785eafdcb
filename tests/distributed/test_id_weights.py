"""What is said of weights that ids have, or lack."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.id_weights import IdWeights


def test_ids_without_weights_are_told_once_where_there_are_tables(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = IdWeights("bags", weighted=True)
    none = torch.tensor([], dtype=torch.int64)
    weights.check_sent([KeyedJaggedTensor([], none, lengths=none)])
    assert not caplog.records, "a rank that has no table gets no features"
    for _ in range(2):
        ids = KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))
        weights.check_sent([ids])
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "bags is is_weighted, and its batches have no weights"
    ]
