"""bench.random_groups: batches as hot ones are made, of samples that are drawn at random."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from recd_plugin_scars.hot_order import sort_rows
from recd_plugin_scars.window_reader import WindowReader
from recd_plugins.api import DatasetWrapper, PluginOptions, Reader, Rows, Split, hookimpl
from recd_plugins.api.reading import RowTable


class RandomGroups(DatasetWrapper):
    """What the order within windows changes when it has nothing to do with what samples read."""

    name = "bench.random_groups"

    class Options(PluginOptions):
        share: float = Field(gt=0, lt=1, description="Samples that are drawn.")
        batches: int = Field(gt=0, description="Of a window.")
        seed: int = Field(ge=0, description="Of the draw.")

    options: Options

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        def inner(rank: int, world_size: int) -> Reader:
            return self.inner.reader(
                rank=rank, world_size=world_size, batch_size=batch_size, split=split
            )

        if split != "train":
            return inner(rank, world_size)
        return WindowReader(
            inner,
            _RandomOrder(self.options),
            num_batches=self.options.batches,
            rank=rank,
            world_size=world_size,
        )


class _RandomOrder:
    def __init__(self, options: RandomGroups.Options) -> None:
        self._options = options

    def identity(self) -> dict[str, Any]:
        return self._options.model_dump()

    def sort(self, window: Sequence[Rows]) -> Iterator[Rows]:
        first = window[0].origins[0]
        place = zlib.crc32(f"{first.path} {first.first_row}".encode())
        random = np.random.default_rng([self._options.seed, place])
        table = RowTable(window)
        drawn = random.random(len(table)) < self._options.share
        for batch in sort_rows(drawn, len(window[0])):
            yield table.take(batch.rows, {})


@hookimpl
def register_datasets() -> list[type[RandomGroups]]:
    return [RandomGroups]
