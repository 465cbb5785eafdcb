"""Options and methods that all stream datasets share."""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import closing
from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from recd_plugin_streaming.columns import Columns, Role
from recd_plugin_streaming.reader import WindowReader
from recd_plugin_streaming.scored import ScoredTable
from recd_plugin_streaming.source import Source
from recd_plugin_streaming.windows import Grouping
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    Origin,
    PluginOptions,
    Reader,
    Rows,
    Split,
    row_tables,
)


class StreamOptions(PluginOptions):
    """Options of columns and windows."""

    columns: dict[str, Role] = Field(
        min_length=2,
        description="Columns and their roles. id, ids: feature with one integer or a list. number: "
        "dense feature. label: 0 or 1. key, text: integer or text for group_by only.",
    )
    group_by: str | None = Field(
        default=None,
        description="Column of the session or request. Rows with equal values follow each other.",
    )
    window_rows: PositiveInt = Field(
        default=8192, description="For group_by: most rows in a window of a rank."
    )
    window_seconds: PositiveFloat = Field(
        default=5.0, description="For group_by: longest duration of a window."
    )

    @model_validator(mode="after")
    def _names_columns(self) -> Self:
        roles = list(self.columns.values())
        if roles.count("label") != 1:
            raise ValueError(
                f"{roles.count('label')} columns have the role label. Give it to one column"
            )
        grouping = self.columns.get(self.group_by or "")
        if self.group_by is not None and grouping not in ("id", "key", "text"):
            raise ValueError(
                f"group_by: {self.group_by!r} is no column with the role id, key or text. Add it "
                "to columns with the role key (integers) or text"
            )
        return self


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
        options = self.options
        grouping = None
        if options.group_by is not None:
            grouping = Grouping(options.group_by, options.window_rows, options.window_seconds)
        return WindowReader(self._source(rank, world_size), grouping, batch_size)

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
