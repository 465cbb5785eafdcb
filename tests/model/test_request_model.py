"""Models that compute the user side once per request: the same results as per row."""

from __future__ import annotations

import pytest
import torch
from tests.model import request_cases as cases
from torch import Tensor, nn

from recd_plugins import Dedup, RequestModel, request_rows
from recd_plugins.api import CandidateBatch, UserBatch, UserSide
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.sharding.guards import guard
from recd_plugins.sparse.request_rows import RequestRows
from recd_plugins.testing.gloo import run_on_ranks

REQUEST = RequestRows(torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 3, 4]), ("user",), (0,))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_it_trains_as_a_model_that_computes_per_row(world_size: int) -> None:
    found = run_on_ranks(cases.both_ways, world_size, local_world_size=min(2, world_size))
    for per_row, per_request, of_shardings in found:
        for name, losses in of_shardings.items():
            assert losses == pytest.approx(per_row.losses, abs=1e-6), name
        assert per_request.losses == pytest.approx(per_row.losses, abs=1e-6)
        for name, value in per_row.tables.items():
            torch.testing.assert_close(per_request.tables[name], value, atol=1e-6, rtol=0)
        for name, value in per_row.dense.items():
            torch.testing.assert_close(per_request.dense[name], value, atol=1e-5, rtol=0)


class Tower(RequestModel):
    """A user side of one dense column; ``seen`` has the rows that it was computed for."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.seen: list[int] = []

    def user(self, batch: UserBatch) -> Tensor:
        rows = batch.select(batch.dense_features)
        self.seen.append(len(rows))
        return self.layers(rows)

    def candidate(self, batch: CandidateBatch, user: UserSide) -> Tensor:
        expanded: Tensor = user.expanded
        return expanded.flatten(1).sum(1) * (1 + batch.labels)


def inputs(dense: Tensor, request: RequestRows | None) -> ModelInput:
    labels = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    return ModelInput(dense, None, labels, request=request)


@pytest.mark.parametrize("shape", [(4,), (4, 5)])
def test_batch_normalization_counts_every_row(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    dense = torch.randn(3, *shape, dtype=torch.float64)[REQUEST.inverse]
    found = []
    for request in (REQUEST, None):
        model = Tower(nn.BatchNorm1d(4)).double()
        loss, _ = model(inputs(dense, request))
        loss.backward()
        assert model.seen == [6 if request is None else 3]
        norm = model.layers[0]
        model.eval()
        scores = model.scores(inputs(dense, request))
        grads = norm.weight.grad, norm.bias.grad
        found.append((loss, scores, *grads, norm.running_mean, norm.running_var))
    for once, per_row in zip(*found, strict=True):
        torch.testing.assert_close(once, per_row, atol=1e-12, rtol=0)


def test_columns_that_differ_within_a_request_are_refused() -> None:
    dense = torch.tensor([[7.0, 1.0], [7.0, 1.0], [7.0, 1.0], [8.0, 4.0], [9.0, 5.0], [9.0, 6.0]])
    batch = UserBatch(inputs(dense, REQUEST), {}, REQUEST)
    assert batch.select(dense[:, 0]).tolist() == [7.0, 8.0, 9.0]
    message = "rows 4 and 5 are the same request, but column 1 has 5.0 and 6.0"
    with pytest.raises(ValueError, match=message):
        batch.select(dense)
    with pytest.raises(ValueError, match=r"but column 0 has -5\.0 and -6\.0"):
        batch.select(-dense[:, 1])
    with pytest.raises(RuntimeError) as caught:
        Tower(nn.Linear(3, 1))(inputs(dense[:, :1], REQUEST))
    assert "tensors of the batch have 6 rows, but vectors in user() have 3" in str(
        caught.value.__notes__
    )


def test_candidate_features_are_refused_in_user() -> None:
    vectors = {"user": torch.arange(6.0).view(6, 1), "item": torch.zeros(6, 1)}
    chosen = UserBatch(None, vectors, REQUEST).vectors
    assert chosen["user"].tolist() == [[0.0], [3.0], [4.0]]
    with pytest.raises(LookupError, match="'item' is not a user feature; these are 'user'"):
        chosen["item"]
    with pytest.raises(LookupError, match=r"no feature 'usr'\. Did you mean 'user'\?"):
        chosen["usr"]


def test_request_rows_of_deduplicated_and_plain_batches() -> None:
    model = cases.Ranker()
    batch = next(cases.batches(0))
    guard(model)
    dedup = Dedup(model)
    (stored,) = dedup([batch], features=["user", "clicks"])
    request = model.request_rows(stored)
    assert request.first_rows.tolist() == [0, *range(2, 32, 4)]
    assert model.request_rows(batch) is None
    model.eval()
    torch.testing.assert_close(model.scores(stored), model.scores(batch))


def test_unknown_features_of_request_rows_are_named() -> None:
    model = cases.Ranker()
    guard(model)
    (stored,) = Dedup(model)([next(cases.batches(0))], features=["user", "clicks"])
    with pytest.raises(LookupError, match=r"no feature 'usr'\. Did you mean 'user'\?"):
        request_rows(stored.sparse, ["usr"])
