"""Models ``ranking.two_tower`` and ``ranking.sasrec``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from recd_plugin_ranking.options import SasRecOptions, TwoTowerOptions
from recd_plugins.api import Model, ModelFeatures, RecdError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn


class TwoTower(Model):
    """Two-tower model: the logit is the dot product of a user tower and an item tower."""

    name = "ranking.two_tower"

    class Options(TwoTowerOptions):
        """Options of ``ranking.two_tower``."""

    options: Options

    def build(self, features: ModelFeatures) -> nn.Module:
        from recd_plugin_ranking.two_tower_modules import TwoTowerModule

        options = self.options
        known = [*features.pooled, *features.sequence]
        user = [n for n in known if n not in options.item] if options.user is None else options.user
        if unknown := {*options.item, *user} - set(known):
            raise RecdError(
                f"{self.name}: options 'item' and 'user': the dataset has no sparse feature "
                f"'{min(unknown)}'. Use one of: {', '.join(map(repr, known))}."
            )
        tables = [f"t_{name}" for name in (*user, *options.item)]
        for pattern in options.tables:
            if not any(fnmatchcase(name, pattern) for name in tables):
                raise RecdError(
                    f"{self.name}: option 'tables': '{pattern}' matches no table. Use one of: "
                    f"{', '.join(map(repr, tables))}."
                )
        share = None
        if options.loss == "in_batch" and options.correct:
            name = options.item[0]
            share = _shares(self, features, name, options.rows_of(name))
        return TwoTowerModule(options, (user, options.item), features, share)


def _shares(
    model: Model, features: ModelFeatures, item: str, num_items: int
) -> NDArray[np.float32]:
    from recd_plugin_ranking.ops import shares

    if features.positive_counts is None:
        raise RecdError(
            f"{model.name}: correct: true needs the popularity of items, which is unknown without "
            "training data. Set correct: false."
        )
    return shares(features.positive_counts(item, num_items))


class SasRec(Model):
    """SASRec: self-attention over item histories. Items and histories share one table."""

    name = "ranking.sasrec"

    class Options(SasRecOptions):
        """Options of ``ranking.sasrec``."""

    options: Options

    def build(self, features: ModelFeatures) -> nn.Module:
        from recd_plugin_ranking.sasrec_modules import SasRecModule

        options = self.options
        share = None
        if options.loss == "sampled_softmax" and options.correct:
            share = _shares(self, features, options.item, options.num_embeddings)
        return SasRecModule(options, share)
