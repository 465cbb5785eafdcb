"""``ranking.sasrec``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recd_plugin_ranking.sasrec_options import SasRecOptions
from recd_plugins.api import Model, ModelFeatures, RecdError

if TYPE_CHECKING:
    from torch import nn


class SasRec(Model):
    """Self-attention over a history, whose items share their table with the item (SASRec)."""

    name = "ranking.sasrec"

    class Options(SasRecOptions):
        """Options of ``ranking.sasrec``."""

    options: Options

    def build(self, features: ModelFeatures) -> nn.Module:
        from recd_plugin_ranking.sasrec_modules import SasRecModule
        from recd_plugin_ranking.softmax import shares

        options = self.options
        share = None
        if options.loss == "sampled_softmax" and options.correct:
            if features.positive_counts is None:
                raise RecdError(
                    f"{self.name}: without data nobody knows how popular items are; set correct: "
                    "false or another loss"
                )
            share = shares(features.positive_counts(options.item, options.num_embeddings))
        return SasRecModule(options, share)
