"""Parquet and Arrow files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from recd_plugin_tables.sources.file_format import FileFormat
from recd_plugin_tables.sources.source import BATCH_ROWS
from recd_plugins.api import DataError, Location, int96_columns

_FILE_MAGIC = b"ARROW1"
#: End-of-stream mark of Arrow IPC. Before Arrow 0.15 it was only the last four bytes.
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


class ParquetFormat(FileFormat):
    """Parquet files."""

    name = "parquet"
    suffixes = (".parquet", ".pq", ".parq")

    def schema(self, file: Location) -> pa.Schema:
        with file.open() as source, _open_parquet(source) as table:
            if int96_columns(table.metadata):
                return table.schema_arrow
            return table.schema.to_arrow_schema()

    def num_rows(self, file: Location) -> int | None:
        with file.open() as source:
            return int(pq.read_metadata(source).num_rows)

    def read(
        self,
        file: Location,
        schema: pa.Schema,  # noqa: ARG002
        columns: Sequence[str],
    ) -> Iterator[pa.RecordBatch]:
        with file.open() as source, _open_parquet(source) as table:
            # Top columns by their numbers: a name with a dot would be taken for a struct's field.
            yield from table.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=True)


class ArrowFormat(FileFormat):
    """Arrow IPC files and streams, and Feather files, which are the former."""

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")

    def schema(self, file: Location) -> pa.Schema:
        with file.open() as source:
            return _open(source).schema

    def num_rows(self, file: Location) -> int | None:
        with file.open() as source:
            reader = _open(source)
            if not isinstance(reader, ipc.RecordBatchFileReader):
                return None
            return sum(
                reader.get_batch(number).num_rows for number in range(reader.num_record_batches)
            )

    def read(
        self,
        file: Location,
        schema: pa.Schema,  # noqa: ARG002
        columns: Sequence[str],
    ) -> Iterator[pa.RecordBatch]:
        with file.open() as source:
            reader = _open(source)
            batches: Iterator[pa.RecordBatch]
            if isinstance(reader, ipc.RecordBatchFileReader):
                batches = (reader.get_batch(n) for n in range(reader.num_record_batches))
            else:
                batches = _whole_stream(file, source, reader)
            for batch in batches:
                chosen = batch.select(list(columns))
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield chosen.slice(start, BATCH_ROWS)


def _whole_stream(
    file: Location, source: pa.NativeFile, reader: ipc.RecordBatchStreamReader
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream. A missing end mark is an error here, but not for Arrow."""
    end, num_rows = source.tell(), 0
    for batch in reader:
        end, num_rows = source.tell(), num_rows + batch.num_rows
        yield batch
    source.seek(end)
    rest = source.read(len(STREAM_END) + 1)
    if rest not in (STREAM_END, STREAM_END[4:]):
        longer = rest.startswith((STREAM_END, STREAM_END[4:]))
        what = (
            "has data after its end mark," if longer else "has no end mark, so it may be truncated,"
        )
        raise DataError(
            f"{file}: the Arrow stream {what} after {num_rows:,} rows; write the file again"
        )


def _open_parquet(source: pa.NativeFile) -> pq.ParquetFile:
    # Nanoseconds, which Arrow makes of Spark's times, wrap around beyond the year 2262.
    return pq.ParquetFile(source, page_checksum_verification=True, coerce_int96_timestamp_unit="us")


def _open(source: pa.NativeFile) -> ipc.RecordBatchFileReader | ipc.RecordBatchStreamReader:
    is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    source.seek(0)
    return ipc.open_file(source) if is_file else ipc.open_stream(source)
