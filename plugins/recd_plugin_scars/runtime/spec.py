"""The cache of one table."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from recd_plugins.api import SetupError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recd_plugin_scars.runtime.policies import PolicyMaker, RowPolicy

CachePolicy = Literal["static", "lfu", "lru"]
"""A built-in policy: the hot rows stay, or the most often used, or the last used ones."""


@dataclass(frozen=True)
class TableCache:
    """Which rows of a table are in fast memory, under any sharding (SCARS, section II).

    Args:
        policy: the name of a built-in policy, a subclass of ``RowPolicy``, or
            ``functools.partial`` of one.
        load_factor: cached rows / rows, 0 to 1. With ``lfu`` and ``lru`` a row-wise shard caches
            this share of its own rows.
        hot_rows: int, rows of the whole table, most read first. ``static`` caches the first
            ``num_cached_rows`` of them; other policies start with those.
        folder: of temporary files with all rows, for tables larger than memory; None keeps them
            in host memory.
        lookahead: whether the rows of the next batch are read while one is computed.

    Raises:
        SetupError: there is no such policy, or ``load_factor`` is not from 0 to 1.
    """

    policy: CachePolicy | PolicyMaker
    load_factor: float
    hot_rows: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    folder: Path | None = None
    lookahead: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy not in get_args(CachePolicy):
            raise SetupError(
                f"there is no cache policy {self.policy!r}: give one of "
                f"{', '.join(get_args(CachePolicy))}, or a subclass of RowPolicy"
            )
        if not 0 <= self.load_factor <= 1:
            raise SetupError(
                f"load_factor of a cache is {self.load_factor}: give the cached share of the "
                "table's rows, 0 to 1"
            )
        if self.hot_rows is None and self.policy_class.only_hot and self.load_factor:
            raise SetupError(
                f"the cache policy {self.policy_name} needs hot_rows: give the rows of the table, "
                "most read first, or take lfu or lru"
            )

    @property
    def policy_maker(self) -> PolicyMaker:
        """Makes the policy of a shard."""
        from recd_plugin_scars.runtime.policies import BUILT_IN

        return BUILT_IN[self.policy] if isinstance(self.policy, str) else self.policy

    @property
    def policy_class(self) -> type[RowPolicy]:
        """The class of the policy."""
        maker = self.policy_maker
        made = maker.func if isinstance(maker, partial) else maker
        assert isinstance(made, type)
        return made

    @property
    def policy_name(self) -> str:
        """The name of the policy, for reports."""
        return self.policy_class.name

    def num_cached_rows(self, num_embeddings: int) -> int:
        """Cached rows of a table with ``num_embeddings`` rows."""
        return round(self.load_factor * num_embeddings)

    def first_hot_rows(self, table: str, num_embeddings: int) -> NDArray[np.int64]:
        """Return the rows cached from the start, most read first, ``[<= num_cached_rows]``.

        Raises:
            SetupError: the table lacks a row or has it twice, or ``static`` has too few.
        """
        import numpy as np

        num_cached = self.num_cached_rows(num_embeddings)
        if self.hot_rows is None:
            return np.empty(0, np.int64)
        rows = self.hot_rows[:num_cached].astype(np.int64)
        if self.policy_class.only_hot and len(rows) < num_cached:
            raise SetupError(
                f"the cache of table {table} holds {num_cached} rows and hot_rows names "
                f"{len(rows)}: lower load_factor, or name as many rows"
            )
        wrong = rows[(rows < 0) | (rows >= num_embeddings)]
        if len(wrong):
            raise SetupError(
                f"hot_rows of table {table} names row {wrong[0]}, and the table has "
                f"{num_embeddings} rows: the profile is of another table"
            )
        if len(np.unique(rows)) < len(rows):
            raise SetupError(f"hot_rows of table {table} names a row twice")
        return rows
