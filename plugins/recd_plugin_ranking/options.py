"""Options of the ranking models."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from recd_plugins.api import PluginOptions


class TwoTowerOptions(PluginOptions):
    """Options of ``ranking.two_tower``."""

    item: list[str] = Field(
        min_length=1, description="Item features, with the id first. Names only, no patterns."
    )
    user: list[str] | None = Field(
        default=None,
        description="User features, with the id first; null means all sparse features except the "
        "item's.",
    )
    user_dense: list[NonNegativeInt] = Field(
        default=[], description="0-based columns of the user's dense features."
    )
    item_dense: list[NonNegativeInt] = Field(
        default=[],
        description="0-based columns of the item's dense features. Columns in neither "
        "list are not used.",
    )
    embedding_dim: int = Field(
        default=32,
        gt=0,
        multiple_of=4,
        description="Width of embeddings and of the towers' output vectors.",
    )
    num_embeddings: PositiveInt = Field(
        default=100_000, description="Number of rows of tables that are not in tables."
    )
    tables: dict[str, PositiveInt] = Field(
        default={},
        description="Number of rows for each table name or pattern. A table is named t_<feature>.",
    )
    hidden: list[PositiveInt] = Field(default=[64], description="Hidden layer sizes of each tower.")
    loss: Literal["binary", "in_batch"] = Field(
        default="in_batch",
        description="binary: predict the label of each row. in_batch: predict the item of"
        " each positive row among the items of the batch's positive rows. "
        "Rows with label 0 only affect binary.",
    )
    correct: bool = Field(
        default=True,
        description="For in_batch: subtract the log of the item's share of positive "
        "training rows from its logit (logQ). Without it, popular items are "
        "penalized because they appear in most batches.",
    )
    mask_same_user: bool = Field(
        default=True,
        description="For in_batch: items of a user's other rows are no negatives. Needs user, "
        "whose first feature identifies the user.",
    )
    temperature: float = Field(default=1.0, gt=0, description="Divisor of the dot products.")
    normalize: bool = Field(
        default=False,
        description="Normalize vectors to length 1. Use with a temperature of about 0.05.",
    )

    def rows_of(self, feature: str) -> int:
        """Return the number of rows of a feature's table, from the first pattern that matches."""
        matching = (rows for name, rows in self.tables.items() if fnmatchcase(f"t_{feature}", name))
        return next(matching, self.num_embeddings)


class SasRecOptions(PluginOptions):
    """Options of ``ranking.sasrec``."""

    history: str = Field(description="Feature with the user's earlier items, oldest first.")
    item: str = Field(description="Item feature with one id per row.")
    num_embeddings: int = Field(gt=0, description="Number of rows of the item table.")
    embedding_dim: int = Field(
        default=64, gt=0, multiple_of=4, description="Width of an embedding."
    )
    layers: int = Field(default=2, gt=0, description="Number of encoder layers.")
    heads: int = Field(
        default=2, gt=0, description="Number of attention heads. Must divide embedding_dim."
    )
    max_length: int = Field(
        default=50,
        gt=0,
        description="Maximum number of items in a history. The latest items are kept.",
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout probability. Rows that share a stored history also share its"
        " mask. Without deduplication each row has its own mask; both are "
        "valid.",
    )
    loss: Literal["binary", "softmax", "sampled_softmax"] = Field(
        default="sampled_softmax",
        description="binary: predict the label of each row. softmax: predict the item of "
        "positive rows among all items, with an output matrix replicated on "
        "every rank. sampled_softmax: predict it among the items of the "
        "batch, with the rows of the table.",
    )
    targets: Literal["all", "last"] = Field(
        default="all",
        description="For softmax. all: also predict each item of a history from the items "
        "before it. last: predict only the row's own item.",
    )
    correct: bool = Field(
        default=True,
        description="For sampled_softmax: subtract the log-probability that the batch "
        "contains an item from its logit (logQ). It follows from the items' "
        "shares of the training split.",
    )
    most_candidates: int | None = Field(
        default=None,
        gt=0,
        description="For sampled_softmax: maximum number of candidate items per batch; "
        "null means all items.",
    )
    temperature: float = Field(default=1.0, gt=0, description="Divisor of the dot products.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.embedding_dim % self.heads:
            raise ValueError(
                f"option 'embedding_dim' is {self.embedding_dim}, which is not a multiple of "
                f"option 'heads' ({self.heads}). Change one of these options"
            )
        if self.history == self.item:
            raise ValueError(
                f"options 'history' and 'item' are both {self.item!r}. Use different features"
            )
        return self
