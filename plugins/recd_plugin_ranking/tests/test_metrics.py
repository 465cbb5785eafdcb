"""Metric ``ranking.metrics``: torchmetrics' and torchrec's figures, and ties in random order."""

from __future__ import annotations

import pickle
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics.functional import retrieval
from torchrec.metrics.gauc import compute_gauc_3d

from recd_plugin_ranking.metrics import RankingMetrics, figures, means
from recd_plugins.interfaces import ScoredBatch

ORACLES = {
    "mrr": lambda scores, labels, k: retrieval.retrieval_reciprocal_rank(scores, labels),
    "ndcg": retrieval.retrieval_normalized_dcg,
    "recall": retrieval.retrieval_recall,
    "hr": retrieval.retrieval_hit_rate,
}


def test_ranks_and_batches_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    plugin = RankingMetrics(RankingMetrics.Options(k=[2]))
    batches = [
        ScoredBatch(
            torch.randn(size, generator=generator),
            torch.randint(2, (size,), generator=generator).float(),
            torch.randint(6, (size,), generator=generator),
        )
        for size in (16, 5, 16, 9, 1)
    ]

    def seen(share: list[ScoredBatch]) -> Any:
        state = plugin.start()
        for batch in share:
            state = plugin.update(state, batch)
        return pickle.loads(pickle.dumps(state))

    one = plugin.results([seen(batches)])
    for shares in ([batches[:2], batches[2:]], [batches[1:], [], batches[:1]]):
        found = plugin.results([seen(share) for share in shares])
        assert found == pytest.approx(one, rel=1e-9, abs=1e-12)


def _sessions(sizes: list[int], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    sessions = np.repeat(np.arange(len(sizes)) * 7 - 3, sizes)
    order = generator.permutation(len(sessions))
    scores = generator.permutation(len(sessions)) / 10
    return sessions[order], scores, generator.random(len(sessions)) < 0.3


@pytest.mark.parametrize("k", [1, 3, 50])
def test_figures_are_those_of_torchmetrics_and_torchrec(k):
    sessions, scores, labels = _sessions([4, 9, 1, 12, 6, 3] * 5, k)
    found = means([figures(sessions, scores, labels, [k])])
    expected: dict[str, list[float]] = {name: [] for name in (*ORACLES, "gauc")}
    for session in np.unique(sessions):
        mine = sessions == session
        score, label = torch.from_numpy(scores[mine]), torch.from_numpy(labels[mine])
        if not label.any():
            continue
        for name, oracle in ORACLES.items():
            expected[name].append(float(oracle(score, label, min(k, len(score)))))
        if not label.all():
            ones = torch.ones(1, 1, len(label), dtype=torch.float64)
            gauc = compute_gauc_3d(score[None, None], label[None, None].double(), ones)
            expected["gauc"].append(float(gauc["auc_sum"]))
    for name, values in expected.items():
        shown = name if name in ("mrr", "gauc") else f"{name}_at_{k}"
        # Those of torchmetrics are of float32.
        assert found[shown] == pytest.approx(np.mean(values), abs=1e-6), name


def test_ties_count_as_the_mean_over_all_orders_of_them():
    scores = np.array([3.0, 1, 1, 1, 1, 0])
    labels = np.array([False, True, False, True, False, True])
    one = np.zeros(6, np.int64)
    found = means([figures(one, scores, labels, [2, 3])])
    orders = []
    for order in permutations(range(4)):
        scores = np.array([9.0, *(8 - np.array(order)), 0])
        orders.append(means([figures(one, scores, labels, [2, 3])]))
    for name, value in found.items():
        assert value == pytest.approx(np.mean([order[name] for order in orders])), name


def test_scores_apart_by_rounding_tie():
    generator = np.random.default_rng(0)
    sessions, scores = generator.integers(0, 30, 300), generator.integers(0, 4, 300) / 10
    labels = generator.random(300) < 0.3
    rounded = scores.astype(np.float32) + generator.integers(-3, 4, 300).astype(np.float32) * 1e-7
    expected = means([figures(sessions, scores, labels, [1, 3])])
    found = means([figures(sessions, rounded.astype(np.float64), labels, [1, 3])])
    assert found == pytest.approx(expected, abs=1e-12)
