"""Which rows of a table are hot and which are flex."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recd_plugins.api import SetupError


@dataclass(frozen=True, eq=False)
class RowTiers:
    """The rows of one table that have copies (FlexShard, arXiv 2301.02959, section 3).

    All rows that are in neither tier are cold: they are where the table's sharding puts them.

    Attributes:
        hot: rows with a copy on every rank, ``[num_hot]`` int64, most read first.
        flex: rows with a copy in every node, dealt to its ranks in turns, ``[num_flex]`` int64,
            most read first.

    Raises:
        SetupError: a row is there twice, or negative.
    """

    hot: NDArray[np.int64]
    flex: NDArray[np.int64]

    def __init__(self, hot: ArrayLike = (), flex: ArrayLike = ()) -> None:
        for name, rows in (("hot", hot), ("flex", flex)):
            array = np.array(rows, dtype=np.int64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        chosen = np.concatenate([self.hot, self.flex])
        if len(chosen) and chosen.min() < 0:
            raise SetupError(f"row {chosen.min()} of a tier is negative: rows start at 0")
        distinct, counts = np.unique(chosen, return_counts=True)
        if len(distinct) < len(chosen):
            raise SetupError(
                f"row {distinct[counts > 1][0]} is in the tiers twice: "
                "a row is hot, or flex, or in neither"
            )

    def check(self, table: str, num_embeddings: int) -> None:
        """Refuse rows that the table does not have.

        Raises:
            SetupError: names the table, the row and the table's size.
        """
        for name, rows in (("hot", self.hot), ("flex", self.flex)):
            if len(rows) and rows.max() >= num_embeddings:
                raise SetupError(
                    f"the {name} tier of table {table} has row {rows.max()}, and the table "
                    f"{num_embeddings} rows: its access profile is of another table size"
                )
