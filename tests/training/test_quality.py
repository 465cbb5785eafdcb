"""Normalized entropy and AUC against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recd_plugins.interfaces.callback import Quality
from recd_plugins.runtime.launch import launch
from recd_plugins.training.evaluation import Predictions, measure


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(500, dtype=torch.double)
    return logits, (torch.rand(500) < torch.sigmoid(logits)).double()


def test_against_definitions() -> None:
    logits, labels = data()
    quality = measure(logits, labels)

    probability = torch.sigmoid(logits)
    entropy = torch.nn.functional.binary_cross_entropy(probability, labels)
    base = torch.full_like(labels, float(labels.mean()))
    assert quality.normalized_entropy == pytest.approx(
        float(entropy / torch.nn.functional.binary_cross_entropy(base, labels)), rel=1e-6
    )
    positive, negative = logits[labels == 1], logits[labels == 0]
    wins = (positive[:, None] > negative).double().mean()
    assert quality.auc == pytest.approx(float(wins), abs=1e-6)
    assert quality.num_samples == 500
    assert quality.log_loss == pytest.approx(float(entropy), rel=1e-6)
    calibration = probability.sum() / labels.sum()
    assert quality.calibration == pytest.approx(float(calibration), rel=1e-6)


def test_samples_that_tie_count_half() -> None:
    """Whatever the order of rows, and where float32 has one probability for two logits."""
    logits, labels = data()
    order = labels.argsort()
    for rows in (order, order.flip(0)):
        of_all = labels[rows]
        assert measure(torch.zeros_like(of_all), of_all).auc == 0.5
        assert measure(20 + 5 * of_all, of_all).auc == 1
        few = logits[rows].round()
        higher = (few[of_all == 1, None] - few[of_all == 0]).sign()
        assert measure(few, of_all).auc == pytest.approx(float((higher.mean() + 1) / 2))


CLOSE = {
    "middling": [-1.0, 0, 1e-3, 1.002, 1.003],
    "ends of the probabilities": [-30.0, -29.99, 17, 17.01, 29.99],
    "negative": [-9.0, -8.99, -3, -0.5],
    "huge": [-1e9, -1.0001e9, 1e6, 1.0001e6],
    "constant": [0.3],
    "infinite": [-torch.inf, 0, torch.inf],
}


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("name", CLOSE)
def test_rounding_breaks_no_tie(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = torch.tensor(CLOSE[name], dtype=torch.double)[torch.randint(len(CLOSE[name]), (300,))]
    labels = torch.randint(2, (300,)).double()
    ulps = torch.randint(-3, 4, (300,)) * torch.finfo(torch.float).eps
    rounded = (exact + ulps * exact.abs().clamp(1, 1e30)).to(dtype)
    expected = measure(exact, labels).auc
    assert measure(rounded.double(), labels).auc == pytest.approx(expected, abs=1e-12)
    if name != "huge":  # whose probabilities are 0 and 1
        again = rounded.double().sigmoid().logit()
        assert measure(again, labels).auc == pytest.approx(expected, abs=1e-12)


def test_close_scores_of_a_dense_sample_are_still_ranked() -> None:
    torch.manual_seed(0)
    logits = torch.linspace(-0.5, 0.5, 1_500_000, dtype=torch.double)  # all of them close
    labels = (torch.rand_like(logits) < torch.sigmoid(logits)).double()
    positives = torch.arange(1, len(logits) + 1)[labels == 1].double()
    wins = positives.sum() - len(positives) * (len(positives) + 1) / 2
    exact = float(wins / len(positives) / (len(labels) - len(positives)))
    assert measure(logits, labels).auc == pytest.approx(exact, abs=1e-6)


def predict(rank: int, world_size: int) -> Quality | None:
    predictions = Predictions()
    logits, labels = data()
    for part in torch.arange(500).chunk(10)[rank::world_size]:
        predictions.update(logits[part], labels[part])
    return predictions.summarize()


def test_over_ranks() -> None:
    logits, labels = data()
    whole = measure(logits, labels)
    for quality in launch(predict, 2):
        assert quality is not None
        assert quality.num_samples == 500
        assert quality.auc == pytest.approx(whole.auc, abs=1e-6)
        assert quality.normalized_entropy == pytest.approx(whole.normalized_entropy, rel=1e-6)
