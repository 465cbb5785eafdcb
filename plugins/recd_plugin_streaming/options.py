"""Methods that all stream datasets share."""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import closing

from recd_plugin_streaming.columns import Columns, StreamOptions
from recd_plugin_streaming.reader import WindowReader
from recd_plugin_streaming.scored import ScoredTable
from recd_plugin_streaming.source import Source
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    Origin,
    Reader,
    Rows,
    Split,
    row_tables,
)


class Stream(Dataset):
    """Base class of stream datasets."""

    is_stream = True
    options: StreamOptions

    def schema(self) -> FeatureSchema:
        return self._columns.features

    @property
    def _columns(self) -> Columns:
        return Columns(self.options.columns)

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        if split != "train":
            raise DataError(f"dataset {self.name!r} is a stream without a {split} split")
        return WindowReader(self._source(rank, world_size), self.options, batch_size)

    def sample(self, batch_size: int) -> Iterator[Rows]:
        waits = found = False
        while not found:
            for rows in row_tables.rebatch(self._existing_rows(), batch_size):
                found = True
                yield rows
            if not found:
                if not waits:
                    say(f"{self.name}: waiting for the first {batch_size} rows")
                waits = True
                time.sleep(0.5)

    def _existing_rows(self) -> Iterator[Rows]:
        for source in self._existing():
            with closing(source):
                source.start(None)
                for chunk in filter(None, source.chunks()):
                    yield Rows(chunk.rows, (Origin(source.what, 0, chunk.rows.num_rows),))

    def to_score(self, location: str) -> Dataset:
        return ScoredTable(self._columns, location)

    @abstractmethod
    def _source(self, rank: int, world_size: int) -> Source:
        """Return a rank's share of the stream."""

    @abstractmethod
    def _existing(self) -> Iterator[Source]:
        """Yield sources of all rows that exist now, from the oldest one on."""


def say(text: str) -> None:
    """Write a line to stderr."""
    print(text, file=sys.stderr, flush=True)
