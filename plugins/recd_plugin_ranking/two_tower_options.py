"""Options of ``ranking.two_tower``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

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
        """Rows of a feature's table: the first matching pattern counts."""
        matching = (rows for name, rows in self.tables.items() if fnmatchcase(f"t_{feature}", name))
        return next(matching, self.num_embeddings)
