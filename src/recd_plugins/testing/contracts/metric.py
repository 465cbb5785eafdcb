"""The contract of metrics."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from recd_plugins.interfaces import Metric, ScoredBatch
from recd_plugins.testing.contracts.plugin import PluginContract


class MetricContract(PluginContract):
    """Tests of a metric: override the fixture ``plugin``."""

    @pytest.fixture
    def batches(self) -> Sequence[ScoredBatch]:
        """Of several sizes, with labels 0 and 1, of five sessions; the last has one sample."""
        generator = torch.Generator().manual_seed(0)
        return [
            ScoredBatch(
                torch.randn(size, generator=generator),
                torch.randint(2, (size,), generator=generator).float(),
                torch.arange(size) % 5,
            )
            for size in (16, 5, 16, 9, 1)
        ]

    def test_results_are_finite_numbers_by_name(
        self, plugin: Metric, batches: Sequence[ScoredBatch]
    ) -> None:
        results = plugin.results([_seen(plugin, batches)])
        assert results, "no figure"
        for name, value in results.items():
            assert isinstance(name, str)
            assert name.isidentifier(), "names are words"
            assert isinstance(value, float | int), f"{name} is {value!r}"
            assert math.isfinite(value), f"{name} is {value}"

    def test_it_does_not_matter_which_rank_saw_a_sample(
        self, plugin: Metric, batches: Sequence[ScoredBatch]
    ) -> None:
        """Nor that a rank saw none."""
        one = plugin.results([_seen(plugin, batches)])
        for shares in (
            [batches[:2], batches[2:]],
            [batches[2:], batches[:2]],
            [batches[1:], [], batches[:1]],
        ):
            ranks = [_seen(copy(plugin), share) for share in shares]  # plugins of their own
            assert plugin.results(ranks) == pytest.approx(one, rel=1e-9, abs=1e-12)

    def test_it_does_not_matter_how_samples_are_batched(
        self, plugin: Metric, batches: Sequence[ScoredBatch]
    ) -> None:
        sessions = [batch.sessions for batch in batches if batch.sessions is not None]
        whole = ScoredBatch(
            torch.cat([batch.logits for batch in batches]),
            torch.cat([batch.labels for batch in batches]),
            torch.cat(sessions) if sessions else None,
        )
        cut = plugin.results([_seen(plugin, batches)])
        assert plugin.results([_seen(plugin, [whole])]) == pytest.approx(cut, rel=1e-9, abs=1e-12)

    def test_leaves_batches_as_they_are(
        self, plugin: Metric, batches: Sequence[ScoredBatch]
    ) -> None:
        before = deepcopy(batches)
        _seen(plugin, batches)
        for batch, as_before in zip(batches, before, strict=True):
            assert torch.equal(batch.logits, as_before.logits), "logits changed"
            assert torch.equal(batch.labels, as_before.labels), "labels changed"
            if batch.sessions is not None and as_before.sessions is not None:
                assert torch.equal(batch.sessions, as_before.sessions), "sessions changed"

    def test_its_state_travels(self, plugin: Metric, batches: Sequence[ScoredBatch]) -> None:
        state = _seen(plugin, batches)
        # Made anew from its options, as on rank 0: the state has all that it needs.
        there = copy(plugin).results([pickle.loads(pickle.dumps(state))])
        assert there == plugin.results([state])

    def test_labels_of_one_kind_do_no_harm(
        self, plugin: Metric, batches: Sequence[ScoredBatch]
    ) -> None:
        """What has no value then is NaN."""
        for label in (0.0, 1.0):
            same = [replace(b, labels=torch.full_like(b.labels, label)) for b in batches]
            assert all(
                isinstance(value, float | int)
                for value in plugin.results([_seen(plugin, same)]).values()
            )


def _seen(plugin: Metric, batches: Iterable[ScoredBatch]) -> Any:
    state = plugin.start()
    for batch in batches:
        state = plugin.update(state, batch)
    return state
