"""Conversion of message values to Arrow rows. Finds messages that do not parse by bisection."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json
from numpy.typing import NDArray

from recd_plugin_streaming.columns import Columns
from recd_plugins.api import DataError, imports

#: Function that converts message values to one row each. Raises ValueError if this is impossible.
Parse = Callable[[Sequence[bytes], Columns], pa.RecordBatch]


def decode(
    values: Sequence[bytes | None], columns: Columns, parse: Parse
) -> tuple[pa.RecordBatch, NDArray[np.int64], dict[int, str]]:
    """Convert message values to rows.

    Returns:
        ``(rows, places, bad)``: a row for each good message, the indices of the good messages
        (int64 ``[num_rows]``), and a dict from the index of each bad message to the reason.
    """
    bad = {place: "the message is empty" for place, value in enumerate(values) if not value}

    def parsed(places: Sequence[int]) -> Iterator[tuple[pa.RecordBatch, Sequence[int]]]:
        """Parse all messages at once. If this fails, divide them in halves to find the bad ones."""
        try:
            yield parse([values[place] or b"" for place in places], columns), places
        except ValueError as error:  # also the base class of ArrowInvalid
            if len(places) == 1:
                bad[places[0]] = re.sub(r" in row \d+$", "", str(error))
                return
            half = len(places) // 2
            yield from parsed(places[:half])
            yield from parsed(places[half:])

    found = list(parsed(full)) if (full := [n for n, value in enumerate(values) if value]) else []
    empty = pa.RecordBatch.from_pylist([], schema=columns.arrow)
    rows = pa.concat_batches([empty, *(batch for batch, _ in found)])
    places = np.array([place for _, of_batch in found for place in of_batch], np.int64)
    if mistakes := columns.mistakes(rows):
        bad |= {int(places[row]): reason for row, reason in mistakes.items()}
        kept = np.delete(np.arange(len(places)), list(mistakes))
        rows, places = rows.take(pa.array(kept)), places[kept]
    return rows, places, bad


def parse_json(values: Sequence[bytes], columns: Columns) -> pa.RecordBatch:
    """Parse messages that are one JSON object each. Other keys than ``columns`` are ignored."""
    for value in values:
        text = value.strip()
        if not (text.startswith(b"{") and text.endswith(b"}")):
            raise ValueError("the message is not a JSON object")
    text = b"\n".join(values)
    table = pa_json.read_json(
        pa.BufferReader(text),
        pa_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
        pa_json.ParseOptions(
            explicit_schema=columns.arrow,
            newlines_in_values=True,
            unexpected_field_behavior="ignore",
        ),
    )
    if table.num_rows != len(values):  # a message with several objects
        raise ValueError("the message is not one JSON object")
    (batch,) = table.select(columns.arrow.names).combine_chunks().to_batches()
    return batch


def parse_arrow(values: Sequence[bytes], columns: Columns) -> pa.RecordBatch:
    """Parse messages of ``recd logs produce``: Arrow IPC streams with one row each."""
    batches = []
    for value in values:
        try:
            batch = pa.ipc.open_stream(value).read_next_batch()
        except (OSError, StopIteration) as error:
            raise ValueError(f"the message is not an Arrow IPC stream ({error})") from error
        if batch.num_rows != 1:
            raise ValueError(f"the message has {batch.num_rows} rows, expected 1")
        batches.append(batch.replace_schema_metadata(None))
    alike = groupby(batches, key=lambda batch: batch.schema)
    return pa.concat_batches([columns.cast(pa.concat_batches(list(each))) for _, each in alike])


def avro_parser(path: Path, schema_id: int | None) -> Parse:
    """Return a parser of Avro records without a container.

    Args:
        path: file with the schema.
        schema_id: id in the header that a schema registry's serializers write; None without one.
    """
    fastavro = imports.optional_library("fastavro", "avro", "format: avro")
    try:
        schema = fastavro.schema.load_schema(str(path))
    except (OSError, ValueError, fastavro.repository.SchemaRepositoryError) as error:
        raise DataError(f"{path}: the Avro schema cannot be read: {error}") from error
    header = b"" if schema_id is None else b"\0" + schema_id.to_bytes(4, "big")

    def parse(values: Sequence[bytes], columns: Columns) -> pa.RecordBatch:
        records = []
        for value in values:
            if not value.startswith(header):
                found = int.from_bytes(value[1:5], "big")
                raise ValueError(f"the message has schema id {found}, expected {schema_id}")
            stream = io.BytesIO(value[len(header) :])
            try:
                records.append(fastavro.schemaless_reader(stream, schema))
            except Exception as error:  # of any type, as it reads any bytes
                raise ValueError(f"the message is not an Avro record ({error!r})") from error
            if stream.read(1):
                raise ValueError("the message is longer than its Avro record")
        try:
            return pa.RecordBatch.from_pylist(records, schema=columns.arrow)
        except pa.ArrowTypeError as error:
            raise ValueError(str(error)) from error

    return parse
