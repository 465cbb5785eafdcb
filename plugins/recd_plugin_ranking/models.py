"""``ranking.two_tower`` and ``ranking.sasrec``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from recd_plugins.api import Model, ModelFeatures, PluginOptions, RecdError, text_utils

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn


class TwoTowerOptions(PluginOptions):
    """Options of ``ranking.two_tower``."""

    item: list[str] = Field(
        min_length=1, description="Features of the item, its id first; names, no patterns."
    )
    user: list[str] | None = Field(
        default=None, description="Features of the user; null: all sparse ones but the item's."
    )
    user_dense: list[NonNegativeInt] = Field(
        default=[], description="Columns of the dense features that are the user's, from 0."
    )
    item_dense: list[NonNegativeInt] = Field(
        default=[], description="Those that are the item's; what neither names is not used."
    )
    embedding_dim: int = Field(
        default=32, gt=0, multiple_of=4, description="Scalars of embeddings and of vectors."
    )
    num_embeddings: PositiveInt = Field(
        default=100_000, description="Rows of a table that tables does not name."
    )
    tables: dict[str, PositiveInt] = Field(
        default={}, description="Rows by name or pattern of a table, t_<feature>."
    )
    hidden: list[PositiveInt] = Field(default=[64], description="Hidden layers of a tower.")
    loss: Literal["binary", "in_batch"] = Field(
        default="in_batch",
        description="Whether a row's label is foretold; or the item of each positive row among "
        "those of the batch's positive rows. Rows of label 0 are for binary alone.",
    )
    correct: bool = Field(
        default=True,
        description="Of in_batch: take from a logit the log of the item's share of positive "
        "rows in the training split (logQ), or popular items, which stand in most batches, "
        "are pushed away.",
    )
    temperature: float = Field(default=1.0, gt=0, description="Dot products are divided by it.")
    normalize: bool = Field(
        default=False, description="Vectors of length 1; take a temperature of 0.05 or so."
    )

    def rows_of(self, feature: str) -> int:
        """Return the rows of a feature's table: the first matching pattern counts."""
        matching = (rows for name, rows in self.tables.items() if fnmatchcase(f"t_{feature}", name))
        return next(matching, self.num_embeddings)


class SasRecOptions(PluginOptions):
    """Options of ``ranking.sasrec``."""

    history: str = Field(description="Feature of the items that the user had, oldest first.")
    item: str = Field(description="Feature of the item, one id a row.")
    num_embeddings: int = Field(gt=0, description="Rows of the table of items.")
    embedding_dim: int = Field(
        default=64, gt=0, multiple_of=4, description="Scalars in an embedding."
    )
    layers: int = Field(default=2, gt=0, description="Layers of the encoder.")
    heads: int = Field(default=2, gt=0, description="Heads; they divide embedding_dim.")
    max_length: int = Field(default=50, gt=0, description="Items of a history, the last ones.")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of values. A history that is stored once has one mask for all rows "
        "that share it: another valid model than without deduplication.",
    )
    loss: Literal["binary", "softmax", "sampled_softmax"] = Field(
        default="sampled_softmax",
        description="Whether a row's label is foretold; or the item of positive rows among all "
        "items, by a matrix of their own that every rank has whole; or among those of the "
        "batch, by the rows of the table.",
    )
    targets: Literal["all", "last"] = Field(
        default="all",
        description="Of softmax: each item of a history is foretold from those before it, too; "
        "or the row's item alone.",
    )
    correct: bool = Field(
        default=True,
        description="Of sampled_softmax: take from a logit the log of the probability that the "
        "batch has its item, by the items' shares in the training split (logQ).",
    )
    most_candidates: int | None = Field(
        default=None,
        gt=0,
        description="Of sampled_softmax: items of a batch that are candidates; null: all.",
    )
    temperature: float = Field(default=1.0, gt=0, description="Dot products are divided by it.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.embedding_dim % self.heads:
            raise ValueError(f"heads {self.heads} do not divide embedding_dim")
        if self.history == self.item:
            raise ValueError(f"history and item are both {self.item}")
        return self


class TwoTower(Model):
    """A tower over the user's features, one over the item's; their dot product is the logit."""

    name = "ranking.two_tower"

    class Options(TwoTowerOptions):
        """Options of ``ranking.two_tower``."""

    options: Options

    def build(self, features: ModelFeatures) -> nn.Module:
        from recd_plugin_ranking.two_tower_modules import TwoTowerModule

        options = self.options
        known = [*features.pooled, *features.sequence]
        user = [n for n in known if n not in options.item] if options.user is None else options.user
        for option, names in (("item", options.item), ("user", user)):
            if unknown := [name for name in names if name not in known]:
                raise RecdError(
                    f"{self.name}: option {option} names {unknown[0]}, which is no sparse feature; "
                    f"there are: {', '.join(known)}"
                )
        tables = [f"t_{name}" for name in (*user, *options.item)]
        for pattern in options.tables:
            if not any(fnmatchcase(name, pattern) for name in tables):
                raise RecdError(
                    f"{self.name}: option tables names {pattern}, which matches no table"
                    + (
                        text_utils.did_you_mean(pattern, tables)
                        or f"; the tables: {text_utils.shortened(tables)}"
                    )
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
            f"{model.name}: without data nobody knows how popular items are; set correct: false"
        )
    return shares(features.positive_counts(item, num_items))


class SasRec(Model):
    """Self-attention over a history, whose items share their table with the item (SASRec)."""

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
