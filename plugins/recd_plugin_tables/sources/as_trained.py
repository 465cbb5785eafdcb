"""A table whose columns without any value are of the types of the table that is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from recd_plugin_tables.kinds import holds_nothing
from recd_plugin_tables.leaves import plain
from recd_plugin_tables.sources.source import Source
from recd_plugins.api import Rows


@dataclass(frozen=True)
class TrainedColumns:
    """Columns of the table that is trained on, as far as they are known.

    Attributes:
        schema: names and types; some may be missing.
        folder_keys: columns that names of folders say.
    """

    schema: pa.Schema
    folder_keys: tuple[str, ...] = ()


class AsTrained(Source):
    """A table, with the types of another one for columns that hold nothing but nulls.

    Args:
        source: the table.
        trained: the columns of the other one.
    """

    def __init__(self, source: Source, trained: TrainedColumns) -> None:
        self._source, self._trained = source, trained.schema
        self.location = source.location

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema(
            [
                field.with_type(plain(self._trained.field(field.name).type))
                if holds_nothing(plain(field.type)) and field.name in self._trained.names
                else field
                for field in self._source.schema
            ]
        )

    @property
    def num_rows(self) -> int | None:
        return self._source.num_rows

    @property
    def folder_keys(self) -> tuple[str, ...]:
        return self._source.folder_keys

    def read(self, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        for rows in self._source.read(columns):
            schema = pa.schema([self.schema.field(name) for name in rows.data.schema.names])
            yield replace(rows, data=rows.data.cast(schema))

    def identity(self) -> dict[str, Any]:
        return self._source.identity()
