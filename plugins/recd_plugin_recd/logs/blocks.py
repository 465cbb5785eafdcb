"""What is in a block before compression: rows as samples, or one record batch."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_recd.logs.samples import SampleCodec
from recd_plugin_recd.logs.shard_format import Record
from recd_plugins.api import DataError


class BlockCodec(Protocol):
    """Turns the rows of a block into bytes and back."""

    def row_sizes(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """About how many bytes each row takes in a block, int64 ``[rows]``."""

    def encode(self, batch: pa.RecordBatch) -> bytes:
        """The block of these rows."""

    def decode(self, data: bytes, num_records: int) -> pa.RecordBatch:
        """The rows of a block.

        Raises:
            DataError: the bytes are not ``num_records`` rows of the schema.
        """


def block_codec(record: Record, schema: pa.Schema) -> BlockCodec:
    """The codec of a kind of records.

    Raises:
        DataError: a column of ``schema`` has no row-wise form.
    """
    return SampleBlocks(schema) if record == "sample" else BatchBlocks(schema)


class SampleBlocks:
    """The lengths of all rows in bytes, uint32 ``[rows]``, then the rows of ``SampleCodec``."""

    def __init__(self, schema: pa.Schema) -> None:
        self._codec = SampleCodec(schema)

    def row_sizes(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        return self._codec.row_sizes(batch) + 4

    def encode(self, batch: pa.RecordBatch) -> bytes:
        rows, offsets = self._codec.encode(batch)
        return np.diff(offsets).astype("<u4").tobytes() + rows.tobytes()

    def decode(self, data: bytes, num_records: int) -> pa.RecordBatch:
        if len(data) < 4 * num_records:
            raise DataError(f"{len(data)} bytes are too few for {num_records} rows")
        offsets = np.zeros(num_records + 1, np.int64)
        np.cumsum(np.frombuffer(data, "<u4", num_records), out=offsets[1:])
        rows = np.frombuffer(data, np.uint8)[4 * num_records :]
        if offsets[-1] != len(rows):
            raise DataError("the lengths of the rows do not add up to the bytes of the block")
        return self._codec.decode(rows, offsets)


class BatchBlocks:
    """An Arrow IPC stream of one record batch: any type of column."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def row_sizes(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        sizes = np.zeros(batch.num_rows, np.int64)
        for column in batch.columns:
            if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
                offsets = column.offsets.to_numpy()
                items = column.values.slice(offsets[0], offsets[-1] - offsets[0])
                sizes += 4 + np.diff(offsets) * -(-items.nbytes // max(1, len(items)))
            else:
                sizes += -(-column.nbytes // max(1, len(column)))
        return sizes

    def encode(self, batch: pa.RecordBatch) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._schema) as writer:
            writer.write_batch(batch)
        return sink.getvalue().to_pybytes()

    def decode(self, data: bytes, num_records: int) -> pa.RecordBatch:
        try:
            batch = pa.ipc.open_stream(data).read_next_batch()
            batch.validate(full=True)
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise DataError(f"the block is no Arrow record batch: {error}") from error
        if batch.num_rows != num_records or not batch.schema.equals(self._schema):
            raise DataError(f"the block is no record batch of {num_records} rows of the schema")
        return batch
