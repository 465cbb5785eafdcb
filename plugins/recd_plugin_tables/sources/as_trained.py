"""A table whose columns without any value are of the types of the table that is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from recd_plugin_tables.kinds import holds_nothing
from recd_plugin_tables.leaves import plain
from recd_plugin_tables.sources.source import Source
from recd_plugins.api import Rows


@dataclass(frozen=True)
class TrainedColumns:
    """Columns of the table that is trained on, as far as they are known.

    Attributes:
        types: by name, of fields of structs by their path; some may be missing.
        folder_keys: columns that names of folders say.
    """

    types: Mapping[str, pa.DataType]
    folder_keys: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: Source) -> TrainedColumns:
        """Those of a table that is there."""
        return cls(dict(_types(source.schema, "")), source.folder_keys)


class AsTrained(Source):
    """A table, with the types of another one for columns that hold nothing but nulls.

    Args:
        source: the table.
        trained: the columns of the other one.
    """

    def __init__(self, source: Source, trained: TrainedColumns) -> None:
        self._source, self._trained = source, trained.types
        self.location = source.location

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema([self._typed(field, "") for field in self._source.schema])

    def _typed(self, field: pa.Field, above: str) -> pa.Field:
        path, kind = above + field.name, plain(field.type)
        if holds_nothing(kind):
            return field.with_type(self._trained.get(path, field.type))
        if not pt.is_struct(kind):
            return field
        return field.with_type(pa.struct([self._typed(each, f"{path}.") for each in kind]))

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


def _types(fields: Iterable[pa.Field], above: str) -> Iterator[tuple[str, pa.DataType]]:
    for field in fields:
        kind = plain(field.type)
        yield above + field.name, kind
        if pt.is_struct(kind):
            yield from _types(kind, f"{above}{field.name}.")
