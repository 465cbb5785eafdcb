"""``ranking.metrics``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from recd_plugins.api import DataError, Metric, PluginOptions, ScoredBatch

if TYPE_CHECKING:
    from torch import Tensor

#: Sessions, logits and labels of batches.
State = list[tuple["Tensor", "Tensor", "Tensor"]]


class RankingMetrics(Metric):
    """GAUC, MRR, and NDCG, recall and hit rate of the first k, by session."""

    name = "ranking.metrics"

    class Options(PluginOptions):
        """Which."""

        names: list[Literal["gauc", "mrr", "ndcg", "recall", "hr"]] = Field(
            default=["gauc", "mrr", "ndcg", "recall", "hr"],
            min_length=1,
            description="Figures: means over the sessions that have a positive sample.",
        )
        k: list[PositiveInt] = Field(
            default=[10], min_length=1, description="First so many samples, of ndcg, recall and hr."
        )

    options: Options

    def start(self) -> State:
        """No samples yet."""
        return []

    def update(self, state: State, batch: ScoredBatch) -> State:
        """With those of the batch."""
        if batch.sessions is None:
            raise DataError(
                f"{self.name}: the dataset does not say which rows are of one session; take one "
                "that does, or leave this metric out"
            )
        state.append((batch.sessions, batch.logits, batch.labels))
        return state

    def results(self, states: Sequence[State]) -> Mapping[str, float]:
        """By name, with k behind those that have one."""
        import numpy as np
        import torch

        from recd_plugin_ranking.ranks import figures, means

        batches = [batch for state in states for batch in state]
        sessions, logits, labels = (torch.cat(each).numpy() for each in zip(*batches, strict=True))
        found = means([figures(sessions, logits.astype(np.float64), labels > 0.5, self.options.k)])
        return {
            name: value
            for name, value in found.items()
            if name.partition("_at_")[0] in self.options.names
        }
