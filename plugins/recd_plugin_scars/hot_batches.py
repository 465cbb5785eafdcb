"""``scars.hot_batches``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import pyarrow.compute as pc
from pydantic import Field, StrictInt, model_validator

from recd_plugin_scars.window_reader import WindowReader
from recd_plugins.api import (
    DatasetWrapper,
    Lookups,
    PluginOptions,
    Reader,
    Rows,
    SetupError,
    Split,
)

if TYPE_CHECKING:
    from recd_plugin_scars.hot_rows import HotRows, HotTable
    from recd_plugin_scars.strategy import CacheStrategy
    from recd_plugins.api import AccessProfile

Count = Annotated[StrictInt, Field(gt=0)]

#: Default number of batches in a window. At most one of them mixes hot and normal samples.
WINDOW_BATCHES = 64


class HotBatches(DatasetWrapper):
    """Groups samples whose ids are all cached into separate batches (SCARS, III and IV)."""

    name = "scars.hot_batches"

    class Options(PluginOptions):
        window: Count | None = Field(
            default=None,
            description="Window of samples per rank that may be reordered, rounded up to whole "
            f"batches; null uses {WINDOW_BATCHES} batches.",
        )
        sessions: bool = Field(
            default=False,
            description=(
                "Keep sessions together: a session is hot if all of its samples in the "
                "window are hot."
            ),
        )
        profile: Path | None = Field(
            default=None,
            description=(
                "Access profile written by recd profile; its most read rows are hot. "
                "null uses the rows in the model's caches."
            ),
        )
        rows: Count | None = Field(
            default=None, description="With profile: number of hot rows per table."
        )
        share: Annotated[float, Field(gt=0, le=1)] | None = Field(
            default=None, description="With profile: hot rows as a share of each table's rows."
        )

        @model_validator(mode="after")
        def _rows_of_a_profile(self) -> Self:
            sizes = [name for name in ("rows", "share") if getattr(self, name) is not None]
            if self.profile is None and sizes:
                raise ValueError(
                    f"{sizes[0]} is how much of a profile is hot; name the profile, or leave it out"
                )
            if self.profile is not None and len(sizes) != 1:
                raise ValueError("with a profile, say how much of it is hot: rows or share")
            return self

    options: Options

    def prepare(self) -> None:
        super().prepare()
        if self.options.sessions and self.inner.session_keys() is None:
            raise SetupError(
                f"{self.name}: {self.inner.name} does not say which rows are of one session; leave "
                "out sessions"
            )
        _ = self._profile

    def check(self) -> None:
        """Refuse a profile of other tables, and caches whose rows change during training."""
        if self._profile is not None:
            tables = {table.name: table for table in self.lookups.tables}
            for name in self._profile.tables:
                if name not in tables:
                    raise SetupError(
                        f"{self.name}: the access profile {self.options.profile} is of table "
                        f"{name}, which the model does not have; its tables: {', '.join(tables)}. "
                        "Profile its data with recd profile registry"
                    )
                self._profile.covering(name, tables[name].num_embeddings)
        _ = self.hot_rows

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        by_sessions = self.options.sessions and split == "train"
        read = self.inner.session_reader if by_sessions else self.inner.reader
        return self._sorted(read, rank, world_size, batch_size, split, with_session=False)

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        read = self.inner.session_reader
        return self._sorted(read, rank, world_size, batch_size, split, with_session=True)

    def _sorted(
        self,
        read: Callable[..., Reader],
        rank: int,
        world_size: int,
        batch_size: int,
        split: Split,
        *,
        with_session: bool,
    ) -> Reader:
        if split != "train":
            return read(rank=rank, world_size=world_size, batch_size=batch_size, split=split)
        window = self.options.window or WINDOW_BATCHES * batch_size
        return WindowReader(
            lambda rank, world_size: read(
                rank=rank, world_size=world_size, batch_size=batch_size, split=split
            ),
            _HotOrder(self, with_session),
            num_batches=-(-window // batch_size),
            rank=rank,
            world_size=world_size,
        )

    @cached_property
    def hot_rows(self) -> HotRows:
        from recd_plugin_scars.hot_rows import HotRows

        tables = self._cached_tables() if self._profile is None else self._profiled_tables()
        return HotRows(tables, self.lookups)

    @cached_property
    def _profile(self) -> AccessProfile | None:
        from recd_plugins.api import AccessProfile

        return None if self.options.profile is None else AccessProfile.load(self.options.profile)

    def _size(self, num_embeddings: int) -> int:
        if self.options.share is not None:
            return round(self.options.share * num_embeddings)
        assert self.options.rows is not None, "checked by Options"
        return min(self.options.rows, num_embeddings)

    def _profiled_tables(self) -> dict[str, HotTable]:
        from recd_plugin_scars.hot_rows import HotTable

        assert self._profile is not None, "the caller looked"
        return {
            name: HotTable(
                table.features, table.num_embeddings, table.rows[: self._size(table.num_embeddings)]
            )
            for name, table in self._profile.tables.items()
        }

    def _cached_tables(self) -> dict[str, HotTable]:
        from recd_plugin_scars.hot_rows import HotTable
        from recd_plugin_scars.strategy import all_caches

        caches = all_caches(_cache_parts(self.lookups))
        if not caches:
            raise SetupError(
                f"{self.name}: no table has a cache, and hot samples are those whose every id is "
                "cached; add a cache: entry with scars.cache, or give this wrapper a profile and "
                "its hot rows"
            )
        dynamic = [
            f"{name} ({cache.policy_name})"
            for name, cache in caches.items()
            if not cache.policy_class.only_hot
        ]
        if dynamic:
            raise SetupError(
                f"{self.name}: the cached rows of {', '.join(dynamic)} change while it trains, so "
                "no sample is hot for good; take policy static, or leave the wrapper out"
            )
        return {
            table.name: HotTable(
                table.features,
                table.num_embeddings,
                caches[table.name].first_hot_rows(table.name, table.num_embeddings),
            )
            for table in self.lookups.tables
            if table.name in caches
        }


def _cache_parts(lookups: Lookups) -> list[CacheStrategy]:
    from recd_plugin_scars.strategy import CacheStrategy

    return [part for part in lookups.parts if isinstance(part, CacheStrategy)]


class _HotOrder:
    def __init__(self, wrapper: HotBatches, with_session: bool) -> None:
        self._wrapper = wrapper
        self._with_session = with_session
        self._session = None
        if wrapper.options.sessions and (keys := wrapper.inner.session_keys()) is not None:
            self._session = keys.session

    def identity(self) -> dict[str, Any]:
        return {
            "sessions": self._session is not None,
            "hot_rows": self._wrapper.hot_rows.digest,
        }

    def sort(self, window: Sequence[Rows]) -> Iterator[Rows]:
        from recd_plugin_scars.hot_rows import sort_rows, whole_sessions
        from recd_plugins.api import row_tables

        hot_rows = self._wrapper.hot_rows
        hot = np.concatenate([hot_rows.samples(rows) for rows in window])
        if self._session is not None:
            hot = whole_sessions(hot, _session_starts(window, self._session))
            if not self._with_session:
                window = [_without(rows, self._session) for rows in window]
        batches = sort_rows(hot, len(window[0]))
        table = row_tables.RowTable(window)
        return map(table.take, batches)


def _session_starts(window: Sequence[Rows], column: str) -> np.ndarray:
    """Return the first row of each session, int64 ``[sessions]``."""
    import pyarrow as pa

    sessions = pa.concat_arrays([rows.data.column(column) for rows in window])
    changes = pc.not_equal(sessions.slice(1), sessions.slice(0, len(sessions) - 1))
    return np.concatenate(([0], np.flatnonzero(changes.to_numpy(zero_copy_only=False)) + 1))


def _without(rows: Rows, column: str) -> Rows:
    names = [name for name in rows.data.schema.names if name != column]
    return Rows(rows.data.select(names), rows.origins)
