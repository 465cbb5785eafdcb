"""Where a row of an import stands in the table that it was made of, for messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_tables.plan import CANDIDATE, ROW


@dataclass(frozen=True)
class SourceRows:
    """Names a row of an import's file by the file and row that it came from.

    Attributes:
        files: of the table in their order, and how many rows each has.
        exploded: whether a row of the table has several of the import, its candidates.
    """

    files: Sequence[tuple[str, int]]
    exploded: bool

    def __call__(self, path: str, row: int) -> str:
        """In words, with the row from 0, and the candidate where there are some."""
        found = _stored(path, row)
        in_file = found[ROW]
        candidate = f", candidate {found[CANDIDATE]}" if self.exploded else ""
        for file, num_rows in self.files:
            if in_file < num_rows:
                return f"{file}: row {in_file} (from 0){candidate}"
            in_file -= num_rows
        raise IndexError(row)


def _stored(path: str, row: int) -> dict[str, int]:
    """What an import keeps of where one of its rows came from."""
    with pq.ParquetFile(pa.OSFile(path)) as file:
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if row < num_rows:
                found = file.read_row_group(group, [ROW, CANDIDATE]).slice(row, 1)
                return dict(found.to_pylist()[0])
            row -= num_rows
    raise IndexError(row)
