"""Options of the ranking models."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from recd_plugins.api import PluginOptions


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
