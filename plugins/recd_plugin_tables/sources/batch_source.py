"""A table that a library hands out as record batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import pyarrow as pa

from recd_plugin_tables.sources.source import BATCH_ROWS, Source, check_names
from recd_plugins.api import DataError, Origin, RecdError, Rows


class BatchSource(Source):
    """What the sources of libraries have in common: rows are numbered as they are read.

    Args:
        location: of the table.
        errors: what the library raises where the table is damaged.
    """

    def __init__(self, location: str, errors: tuple[type[Exception], ...]) -> None:
        self.location = location
        self._errors = (*errors, pa.ArrowException, OSError)

    @abstractmethod
    def read_schema(self) -> pa.Schema:
        """The columns; errors are the library's."""

    @abstractmethod
    def read_batches(self, columns: list[str]) -> Iterable[pa.RecordBatch]:
        """All rows with these columns; errors are the library's."""

    @cached_property
    def schema(self) -> pa.Schema:
        try:
            return check_names(self.location, self.read_schema().remove_metadata())
        except self._errors as error:
            raise self._damaged(error) from error

    def read(self, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        names = self.schema.names if columns is None else list(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        first_row = 0
        try:
            for batch in self.read_batches(names):
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    part = batch.slice(start, BATCH_ROWS)
                    data = part.select(names).cast(schema)
                    yield Rows(data, (Origin(self.location, first_row, data.num_rows),))
                    first_row += data.num_rows
        except self._errors as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> Exception:
        if isinstance(error, RecdError):
            return error
        return DataError(f"{self.location}: cannot be read: {error}")
