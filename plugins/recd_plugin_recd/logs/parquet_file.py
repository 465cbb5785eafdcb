"""A Parquet file that appears when it is complete."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recd_plugin_recd.sessions import plain_sessions
from recd_plugins.api import DataError, check_regular, parse_json

#: Footer key that says, as JSON, which records of a log a file holds.
PROVENANCE = b"recd.log"

_MOST_BATCHES = 512


class ParquetFile:
    """Gathers rows into row groups of about ``block_size`` bytes, with zstd and page checksums.

    Use as a context manager, then ``close``; without that nothing is left behind. ``path`` may
    change until then, within its folder.

    Args:
        sort: a column of sessions whose rows are brought together inside a row group, in the order
            they came; None keeps the order.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        *,
        block_size: int = 64 << 20,
        level: int = 3,
        sort: str | None = None,
    ) -> None:
        self.path = path
        self.num_rows = 0
        self._block_size, self._sort = block_size, sort
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0
        self._scratch = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A dictionary makes lists of ids larger: zstd finds the repeats by itself.
            self._writer = pq.ParquetWriter(
                self._scratch,
                schema,
                compression="zstd",
                compression_level=level,
                use_dictionary=False,
                write_page_checksum=True,
            )
        except (OSError, pa.ArrowNotImplementedError) as error:
            raise self._failed(error) from error

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer.is_open:
            self._writer.close()
        self._scratch.unlink(missing_ok=True)

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows."""
        self._waiting.append(rows)
        self._bytes += rows.nbytes
        self.num_rows += rows.num_rows
        while self._bytes >= self._block_size:
            table = pa.Table.from_batches(self._waiting)
            count = max(1, table.num_rows * self._block_size // self._bytes)
            self._write_block(table.slice(0, count))
            self._waiting = table.slice(count).to_batches()
            self._bytes = sum(each.nbytes for each in self._waiting)
        if len(self._waiting) > _MOST_BATCHES:
            self._waiting = pa.Table.from_batches(self._waiting).combine_chunks().to_batches()

    def close(self, provenance: dict[str, Any]) -> None:
        """Put the file in its place, synced to disk, in place of what was there."""
        if self._waiting:
            self._write_block(pa.Table.from_batches(self._waiting))
        try:
            self._writer.add_key_value_metadata({PROVENANCE: json.dumps(provenance).encode()})
            self._writer.close()
            fsync(self._scratch)
            os.replace(self._scratch, self.path)
            fsync(self.path.parent)
        except OSError as error:
            raise self._failed(error) from error

    def _write_block(self, block: pa.Table) -> None:
        if self._sort is not None:
            block = block.take(pc.sort_indices(plain_sessions(block[self._sort])))  # stable
        try:
            self._writer.write_table(block, row_group_size=block.num_rows)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> DataError:
        return DataError(f"{self.path}: cannot be written ({error})")


def provenance(path: Path) -> dict[str, Any] | None:
    """Return what ``close`` was told of the file at ``path``; None for another file."""
    try:
        check_regular(path)
        metadata = pq.read_metadata(path).metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: no readable Parquet file: {error}") from error
    try:
        found = parse_json(metadata.get(PROVENANCE, b"null"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def fsync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
