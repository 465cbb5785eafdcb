"""A Parquet file that appears when it is complete."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugins.api import DataError
from recd_plugins.api.files import check_regular, parse_json

#: Key of the footer's metadata that says which records of a log a file holds, as JSON.
PROVENANCE = b"recd.log"

_ROW_GROUP_BYTES = 64 << 20


class ParquetFile:
    """Gathers rows into row groups of about 64 MB. Use as a context manager, then ``close``.

    Without ``close`` nothing is left behind.

    Attributes:
        path: where the file will be, in the folder where it was begun.

    Raises:
        DataError: the place cannot be written.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0
        self.num_rows = 0
        self._scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._scratch, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o666)
        except OSError as error:
            raise self._failed(error) from error
        # A dictionary over ids makes lists larger; zstd finds the repeats by itself.
        self._writer = pq.ParquetWriter(
            self._scratch,
            schema,
            compression="zstd",
            compression_level=3,
            use_dictionary=False,
        )

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)
        if self._writer.is_open:
            self._writer.close()
        self._scratch.unlink(missing_ok=True)

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows."""
        self._waiting.append(rows)
        self._bytes += rows.nbytes
        self.num_rows += rows.num_rows
        if self._bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def close(self, provenance: dict[str, Any]) -> None:
        """Put the file in its place, on the disk to stay, in place of what was there."""
        try:
            self._flush()
            self._writer.add_key_value_metadata({PROVENANCE: json.dumps(provenance).encode()})
            self._writer.close()
            os.fsync(self._handle)
            os.replace(self._scratch, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._failed(error) from error

    def _flush(self) -> None:
        if self._waiting:
            table = pa.Table.from_batches(self._waiting, self._schema)
            try:
                self._writer.write_table(table, row_group_size=table.num_rows)
            except OSError as error:
                raise self._failed(error) from error
        self._waiting.clear()
        self._bytes = 0

    def _failed(self, error: OSError) -> DataError:
        return DataError(f"{self.path}: cannot be written ({error.strerror or error})")


def provenance(path: Path) -> dict[str, Any] | None:
    """What ``close`` was told of the file at ``path``; None for another file.

    Raises:
        DataError: it is not Parquet.
    """
    try:
        check_regular(path)
        metadata = pq.read_metadata(path).metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: no readable Parquet file: {error}") from error
    try:
        found = parse_json(metadata.get(PROVENANCE, b"null"))
    except ValueError:  # whoever wrote that, it was not this program
        return None
    return found if isinstance(found, dict) else None
