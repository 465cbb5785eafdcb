"""Synthetic traces as files: text of a column a table, or Parquet."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq

from recd_plugin_dlrm.trace.generator import TraceGenerator
from recd_plugins.api.commands import FileKind, table_kind, text_kind
from recd_plugins.api.files import new_file

#: Key of the Parquet metadata under which a trace says how it was drawn, as JSON.
PROVENANCE = b"recd_plugin_dlrm.trace"
# Rows drawn, and of a Parquet row group.
_ROWS = 1 << 18


def write_trace(
    path: Path,
    generators: Sequence[TraceGenerator],
    accesses: int,
    provenance: Mapping[str, Any],
    progress: Callable[[int], None] = lambda _rows: None,
) -> None:
    """Draw and write traces of ``accesses`` ids each, whole or not at all; holds 262,144 rows.

    Args:
        path: Parquet where it ends in .parquet: a column of int64 for each feature. Else text: in
            a line an id of each, a space between them; gzip where it ends in .gz.
        generators: one a table.
        accesses: of each.
        provenance: JSON values for the metadata of Parquet.
        progress: told after each piece how many rows it had.

    Raises:
        RecdError: the place cannot be written, or a trace cannot be so long.
    """
    fields = [pa.field(each.profile.feature, pa.int64(), nullable=False) for each in generators]
    schema = pa.schema(fields, metadata={PROVENANCE: json.dumps(dict(provenance))})
    with new_file(path) as temporary, ExitStack() as stack:
        writer = _open(stack, path, temporary, schema)
        for first in range(0, accesses, _ROWS):
            size = min(_ROWS, accesses - first)
            columns = [pa.array(each.draw(size)) for each in generators]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
            progress(size)


def trace_kind(path: Path) -> FileKind:
    """Return the kind of file that ``write_trace`` writes there."""
    if path.suffix == ".parquet":
        return table_kind("trace", key=PROVENANCE)
    return text_kind("trace", rb"\A(\x1f\x8b|[-\d \n]+\Z)")


def _open(
    stack: ExitStack, path: Path, temporary: Path, schema: pa.Schema
) -> pq.ParquetWriter | pv.CSVWriter:
    if path.suffix == ".parquet":
        return stack.enter_context(
            pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=False)
        )
    compression = "gzip" if path.suffix == ".gz" else None
    sink = stack.enter_context(pa.output_stream(str(temporary), compression=compression))
    options = pv.WriteOptions(include_header=False, delimiter=" ")
    return stack.enter_context(pv.CSVWriter(sink, schema, write_options=options))
