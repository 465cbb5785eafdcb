"""Delta tables, by deltalake."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from recd_plugin_tables.sources.batch_source import BatchSource
from recd_plugin_tables.sources.source import BATCH_ROWS
from recd_plugins.api import DataError, optional_library


class DeltaSource(BatchSource):
    """A Delta table as its last version has it.

    Raises:
        DataError: it is none, or its columns are mapped to others.
        SetupError: deltalake is not installed.
    """

    def __init__(self, location: str) -> None:
        deltalake = optional_library("deltalake", "delta", location)
        super().__init__(
            location, (optional_library("deltalake.exceptions", "delta", location).DeltaError,)
        )
        try:
            self._table = deltalake.DeltaTable(location)
            mapped = self._table.metadata().configuration.get("delta.columnMapping.mode", "none")
        except self._errors as error:
            raise self._damaged(error) from error
        if mapped != "none":
            raise DataError(
                f"{location}: its columns have other names in its files "
                f"(delta.columnMapping.mode: {mapped}), which deltalake's reader does not heed, so "
                "that values of one could be taken for those of another: write a copy without the "
                "mapping"
            )

    @property
    def num_rows(self) -> int | None:
        return None

    def identity(self) -> dict[str, Any]:
        return {
            "format": "delta",
            "id": self._table.metadata().id,
            "version": self._table.version(),
        }

    def read_schema(self) -> pa.Schema:
        return self._dataset().schema

    def read_batches(self, columns: list[str]) -> Iterable[pa.RecordBatch]:
        return self._dataset().to_batches(columns=columns, batch_size=BATCH_ROWS)

    def _dataset(self) -> Any:
        return self._table.to_pyarrow_dataset()
