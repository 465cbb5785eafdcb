"""A file of scores that grows batch by batch and is there when it is whole."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from recd_plugins.api import RecdError
from recd_plugins.api.files import finite, new_file


class ScoreWriter(ABC):
    """Takes batches of one schema."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file."""


@contextmanager
def score_file(
    path: Path, kind: str, schema: pa.Schema, *, token: str = "", replaces: bool = True
) -> Iterator[ScoreWriter]:
    """A writer of ``path``, which is there at the end, whole, and not before.

    Args:
        path: the file.
        kind: its format.
        schema: of its rows.
        token: as ``new_file`` takes it.
        replaces: likewise.

    Raises:
        RecdError: the place cannot be written, or the format has no such columns.
    """
    nested = [field.name for field in schema if pa.types.is_nested(field.type)]
    if kind == "csv" and nested:
        raise RecdError(
            f"{path}: CSV has no column of lists, which {nested[0]} is; write .parquet or .jsonl"
        )
    binary = [field.name for field in schema if _has_bytes(field.type)]
    if kind == "jsonl" and binary:
        raise RecdError(f"{path}: JSON has no bytes, which {binary[0]} is; write .parquet")
    with new_file(path, token=token, replaces=replaces) as temporary:
        made = (
            _JsonLines(temporary, path)
            if kind == "jsonl"
            else _Arrow(temporary, path, kind, schema)
        )
        try:
            yield made
        finally:
            made.close()


def _has_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _has_bytes(kind.value_type)
    if pa.types.is_nested(kind):
        return any(_has_bytes(kind.field(number).type) for number in range(kind.num_fields))
    return (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


class _Arrow(ScoreWriter):
    def __init__(self, path: Path, named: Path, kind: str, schema: pa.Schema) -> None:
        self._named, self._kind = named, kind
        make = pq.ParquetWriter if kind == "parquet" else pyarrow.csv.CSVWriter
        with self._told():
            self._writer = make(path, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        with self._told():
            self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowException as error:
            raise RecdError(
                f"{self._named}: a column has values that {self._kind} does not take ({error}); "
                "write .parquet"
            ) from error


class _JsonLines(ScoreWriter):
    def __init__(self, path: Path, named: Path) -> None:
        self._named = named
        self._file = path.open("w", encoding="utf-8")

    def write(self, batch: pa.RecordBatch) -> None:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError, LookupError) as error:
            # A time with nanoseconds, of the year 10000, or of a zone that this machine lacks.
            raise RecdError(
                f"{self._named}: a column has values that Python does not take ({error}); write "
                ".parquet"
            ) from error
        for row in rows:
            # Dates, times and decimals as text.
            text = json.dumps(finite(row), default=str, ensure_ascii=False, allow_nan=False)
            self._file.write(text + "\n")

    def close(self) -> None:
        self._file.close()
