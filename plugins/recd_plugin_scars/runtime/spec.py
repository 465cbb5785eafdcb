"""What is cached of a table, and where the rest of it lives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from inspect import isabstract
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from recd_plugins.api import SetupError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recd_plugin_scars.runtime.row_policy import PolicyMaker, RowPolicy

CachePolicy = Literal["static", "lfu", "lru"]
"""A built-in policy of which rows stay: the hot rows; the most often used; the last used."""

#: In the folder of a run, on its disk: files of models that leave none. It goes with the last one.
TEMPORARY = "temporary"


@dataclass(frozen=True)
class HostMemory:
    """The backing store is host memory, pinned where there is CUDA."""


@dataclass(frozen=True)
class MappedFile:
    """The backing store is a memory-mapped file, for tables larger than memory.

    Args:
        folder: where the files are made, one for each kernel.
        keep: leave them there when the tables are closed.
    """

    folder: str | Path
    keep: bool = False


@dataclass(frozen=True)
class TableCache:
    """What the fast memory holds of one table, by whatever sharding it has (SCARS, section II).

    Args:
        policy: which rows stay: the name of a built-in policy, a subclass of ``RowPolicy``, or
            ``functools.partial`` of one.
        load_factor: cached rows / rows, 0 to 1. Of a row-wise shard, ``lfu`` and ``lru`` hold this
            share of its own rows.
        hot_rows: rows of the whole table, most read first. ``static`` caches the first
            ``num_cached_rows`` of them; the others start from those, if there are any.
        storage: the backing store.
        lookahead: whether the rows of the next batch are read while one computes.

    Raises:
        SetupError: says what is wrong with which value.
    """

    policy: CachePolicy | PolicyMaker
    load_factor: float
    hot_rows: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    storage: HostMemory | MappedFile = HostMemory()
    lookahead: bool = True

    def __post_init__(self) -> None:
        self._check_policy()
        if not (math.isfinite(self.load_factor) and 0 <= self.load_factor <= 1):
            raise SetupError(
                f"a table's cache has load_factor {self.load_factor}, the share of its rows that "
                "the fast memory holds: give a number from 0 to 1"
            )
        if self.hot_rows is None:
            if self.policy_class.only_hot and self.load_factor > 0:
                raise SetupError(
                    f"a table's cache has the policy {self.policy_name} and no hot_rows, of which "
                    "it holds the first: give the rows of the table, most read first, or the "
                    "policy lfu or lru"
                )
        elif self.hot_rows.ndim != 1 or self.hot_rows.dtype.kind not in "iu":
            raise SetupError(
                f"hot_rows of a table's cache have shape {self.hot_rows.shape} and type "
                f"{self.hot_rows.dtype}: give one row of integers"
            )

    @property
    def policy_maker(self) -> PolicyMaker:
        """What makes the policy of a shard."""
        from recd_plugin_scars.runtime.policies import BUILT_IN

        return BUILT_IN[self.policy] if isinstance(self.policy, str) else self.policy

    @property
    def policy_class(self) -> type[RowPolicy]:
        """The class of the policy."""
        from recd_plugin_scars.runtime.row_policy import class_of

        return class_of(self.policy_maker)

    @property
    def policy_name(self) -> str:
        """The name of the policy, for reports."""
        return self.policy_class.name

    def _check_policy(self) -> None:
        from recd_plugin_scars.runtime.row_policy import RowPolicy

        policy = self.policy
        if isinstance(policy, str):
            if policy in get_args(CachePolicy):
                return
        else:
            made = policy.func if isinstance(policy, partial) else policy
            if isinstance(made, type) and issubclass(made, RowPolicy) and not isabstract(made):
                return
        raise SetupError(
            f"a table's cache has the policy {policy!r}; there are "
            f"{', '.join(get_args(CachePolicy))}, and subclasses of "
            "recd_plugin_scars.api.RowPolicy that have a release"
        )

    def num_cached_rows(self, num_embeddings: int) -> int:
        """How many rows of a table with ``num_embeddings`` rows the fast memory holds."""
        return round(self.load_factor * num_embeddings)

    def first_hot_rows(self, table: str, num_embeddings: int) -> NDArray[np.int64]:
        """The hot rows that are cached from the start, most read first, ``[<= num_cached_rows]``.

        Raises:
            SetupError: a row is none of the table, is there twice, or ``static`` has too few.
        """
        import numpy as np

        num_cached = self.num_cached_rows(num_embeddings)
        if self.hot_rows is None:
            return np.empty(0, np.int64)
        rows = self.hot_rows[:num_cached].astype(np.int64)
        if self.policy_class.only_hot and len(rows) < num_cached:
            raise SetupError(
                f"the cache of table {table} holds {num_cached} rows (load_factor "
                f"{self.load_factor} of {num_embeddings}) and hot_rows names {len(rows)}: lower "
                "load_factor, or name as many rows"
            )
        wrong = rows[(rows < 0) | (rows >= num_embeddings)]
        if len(wrong):
            raise SetupError(
                f"hot_rows of table {table} names row {wrong[0]}, and the table has "
                f"{num_embeddings} rows: the profile is of another table"
            )
        if len(np.unique(rows)) < len(rows):
            values, counts = np.unique(rows, return_counts=True)
            raise SetupError(f"hot_rows of table {table} names row {values[counts > 1][0]} twice")
        return rows
