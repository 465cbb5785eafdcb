"""Lance datasets, by pylance."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import pyarrow as pa

from recd_plugin_tables.sources.batch_source import BatchSource
from recd_plugins.api import optional_library


class LanceSource(BatchSource):
    """A Lance dataset as its last version has it.

    Raises:
        DataError: it is none.
        SetupError: pylance is not installed.
    """

    def __init__(self, location: str) -> None:
        super().__init__(location, (ValueError,))
        lance = optional_library("lance", "lance", location)
        try:
            self._dataset = lance.dataset(location)
        except self._errors as error:
            raise self._damaged(error) from error

    @cached_property
    def num_rows(self) -> int | None:
        return int(self._dataset.count_rows())

    def identity(self) -> dict[str, Any]:
        files = sorted(
            [file.path, file.file_size_bytes]
            for fragment in self._dataset.get_fragments()
            for file in fragment.data_files()
        )
        return {"format": "lance", "version": self._dataset.version, "files": files}

    def read_schema(self) -> pa.Schema:
        return self._dataset.schema

    def read_batches(self, columns: list[str]) -> Iterable[pa.RecordBatch]:
        return self._dataset.to_batches(columns=columns, scan_in_order=True)
