"""Normalized entropy and AUC against their definitions."""

from __future__ import annotations

import pytest
import torch

from recd_plugins.training.quality import measure


def test_against_definitions() -> None:
    torch.manual_seed(0)
    logits = torch.randn(500, dtype=torch.double)
    labels = (torch.rand(500) < torch.sigmoid(logits)).double()
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
