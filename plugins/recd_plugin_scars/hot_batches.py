"""Dataset wrapper ``scars.hot_batches``: batches that read only cached rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow.compute as pc
from pydantic import Field, StrictInt

from recd_plugin_scars.cache import CacheStrategy, all_caches
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

Count = Annotated[StrictInt, Field(gt=0)]

#: Default number of batches in a window. At most one of them mixes hot and normal samples.
WINDOW_BATCHES = 64


class HotBatches(DatasetWrapper):
    """Separates batches of samples that read only cached rows (SCARS, III and IV)."""

    name = "scars.hot_batches"

    class Options(PluginOptions):
        window: Count | None = Field(
            default=None,
            description="Number of consecutive samples per rank that are reordered together, "
            f"rounded up to full batches. null uses {WINDOW_BATCHES} batches.",
        )
        sessions: bool = Field(
            default=False,
            description=(
                "Keep samples of a session together. A session joins a batch of cached rows only "
                "if all its samples in the window look up only cached rows."
            ),
        )

    options: Options

    def prepare(self) -> None:
        super().prepare()
        if self.options.sessions and self.inner.session_keys() is None:
            raise SetupError(
                f"{self.name}: option 'sessions' needs a session column, but dataset "
                f"{self.inner.name!r} has none. Remove this option."
            )

    def check(self) -> None:
        """Raise SetupError if no table is cached, or cached rows change during training."""
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

        return HotRows(self._cached_tables(), self.lookups)

    def _cached_tables(self) -> dict[str, HotTable]:
        from recd_plugin_scars.hot_rows import HotTable

        caches = all_caches(_cache_parts(self.lookups))
        if not caches:
            raise SetupError(
                f"{self.name}: hot samples need cached tables, but no table has a cache. Add an "
                "entry 'scars.cache' to the section cache:."
            )
        dynamic = [
            f"{name!r} ({cache.policy_name})"
            for name, cache in caches.items()
            if not cache.policy_class.only_hot
        ]
        if dynamic:
            raise SetupError(
                f"{self.name}: the cached rows of tables {', '.join(dynamic)} change "
                "during training. Set policy: static in the 'scars.cache' entry, or remove the "
                "wrapper."
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
    return [part for part in lookups.parts if isinstance(part, CacheStrategy)]


class _HotOrder:
    def __init__(self, wrapper: HotBatches, with_session: bool) -> None:
        self._wrapper = wrapper
        self._with_session = with_session
        self._keys = wrapper.inner.session_keys() if wrapper.options.sessions else None

    def identity(self) -> dict[str, Any]:
        return {
            "sessions": self._keys is not None,
            "hot_rows": self._wrapper.hot_rows.digest,
        }

    def sort(self, window: Sequence[Rows]) -> Iterator[Rows]:
        from recd_plugin_scars.hot_rows import sort_rows, whole_sessions
        from recd_plugins.api import row_tables

        hot_rows = self._wrapper.hot_rows
        hot = np.concatenate([hot_rows.samples(rows) for rows in window])
        if self._keys is not None:
            hot = whole_sessions(hot, _session_starts(window, self._keys.session))
            if not self._with_session:
                window = [_without(rows, self._keys.groups) for rows in window]
        batches = sort_rows(hot, len(window[0]))
        table = row_tables.RowTable(window)
        return map(table.take, batches)


def _session_starts(window: Sequence[Rows], column: str) -> np.ndarray:
    """Return the index of the first row of each session, int64 ``[num_sessions]``."""
    import pyarrow as pa

    sessions = pa.concat_arrays([rows.data.column(column) for rows in window])
    changes = pc.not_equal(sessions.slice(1), sessions.slice(0, len(sessions) - 1))
    return np.concatenate(([0], np.flatnonzero(changes.to_numpy(zero_copy_only=False)) + 1))


def _without(rows: Rows, columns: Collection[str]) -> Rows:
    names = [name for name in rows.data.schema.names if name not in columns]
    return Rows(rows.data.select(names), rows.origins)
