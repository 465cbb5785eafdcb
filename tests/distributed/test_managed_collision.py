"""Managed collision of deduplicated batches: the maps, weights and losses of plain ones."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from tests.distributed import managed_collision_cases as cases

from recd_plugins.compat.managed_collision import reset_rows
from recd_plugins.testing.gloo import run_on_ranks


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_maps_and_weights_are_those_of_plain_batches(optimizer: str) -> None:
    for ways in run_on_ranks(cases.three_ways, 2, optimizer):
        plain, deduplicated = ways["plain"], ways["deduplicated"]
        for other in (way for name, way in ways.items() if name != "plain"):
            assert other.losses == pytest.approx(plain.losses, abs=1e-6)
            assert other.state.keys() == plain.state.keys()
            for name, value in plain.state.items():
                exact = not value.is_floating_point()
                atol = 0 if exact else 1e-6
                torch.testing.assert_close(other.state[name], value, atol=atol, rtol=0)
        assert deduplicated.sent < plain.sent / 2
        # Maps that were full evicted.
        ids = next(t for name, t in plain.state.items() if name.endswith("t_b._mch_sorted_raw_ids"))
        assert (ids < cases.NUM_RAW_IDS).sum() == len(ids) - 1


def test_long_sums_are_rounded_in_both_forms() -> None:
    """Next to 64 bits neither is nearer: what they differ by is no fault of unique rows."""
    ranks = run_on_ranks(cases.errors_of_a_long_sum, 2)
    plain, unique = zip(*(each for errors in ranks for each in errors.values()), strict=True)
    assert 1e-6 < max(plain) < 1e-5
    assert max(unique) < 2 * max(plain)


def test_rows_are_reset_as_fbgemms_operator_for_cuda_does() -> None:
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)] * 2,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    )
    weights, states = kernel.split_embedding_weights(), kernel.split_optimizer_states()
    for each in (*weights, *(momentum for momentum, *_ in states)):
        each.fill_(1.0)
    one = torch.tensor([1])
    reset_rows(kernel, torch.tensor([0, 2]), torch.tensor([0, 2]), one, torch.tensor([0]))
    assert [w.sum(dim=1).tolist() for w in weights] == [[8.0] * 4, [0.0, 8.0, 0.0, 8.0]]
    assert [m.tolist() for m, *_ in states] == [[1.0] * 4, [0.0, 1.0, 0.0, 1.0]]
