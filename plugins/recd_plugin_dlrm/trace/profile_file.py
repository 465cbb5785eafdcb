"""The Parquet file of a trace profile: a row, and a row group, for each table.

Columns ``feature`` and ``rows``, and the lists ``ids``, ``distances`` and ``counts``, as in
``TableTrace``. Version and source stand in the file's metadata, as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recd_plugin_dlrm.trace.profile import TraceProfile
from recd_plugin_dlrm.trace.table_trace import TableTrace
from recd_plugins.api import DataError
from recd_plugins.api.files import check_regular, new_file, parse_json

_KEY = b"recd_plugin_dlrm.trace_profile"
_VERSION = 1
_LISTS = ("ids", "distances", "counts")
_NUMBERS = pa.large_list(pa.field("element", pa.int64(), nullable=False))
_SCHEMA = pa.schema(
    [
        pa.field("feature", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        *(pa.field(name, _NUMBERS, nullable=False) for name in _LISTS),
    ]
)
_MAKE = "make one with recd trace profile SOURCE -o FILE"


def write_profile(profile: TraceProfile, path: Path) -> None:
    """Write a profile, whole or not at all.

    Raises:
        RecdError: the place cannot be written.
    """
    head = json.dumps({"version": _VERSION, "source": profile.source})
    schema = _SCHEMA.with_metadata({_KEY: head})
    with (
        new_file(path) as temporary,
        pq.ParquetWriter(
            temporary,
            schema,
            compression="zstd",
            use_dictionary=False,
            write_page_checksum=True,
        ) as writer,
    ):
        for trace in profile.tables.values():
            lists = [_list(getattr(trace, name)) for name in _LISTS]
            columns = [pa.array([trace.feature]), pa.array([trace.rows], pa.int64()), *lists]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def read_profile(path: Path) -> TraceProfile:
    """Read a profile and check all of it.

    Raises:
        DataError: the file is missing, damaged, of another version or no profile.
    """
    try:
        check_regular(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            head = _head(path, file)
            groups = range(file.metadata.num_row_groups)
            traces = [_trace(path, file.read_row_group(group)) for group in groups]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; {_MAKE}") from error
    except (pa.ArrowException, OSError) as error:
        # Arrow's own errors of damaged pages are OSErrors too.
        raise DataError(f"{path}: no Parquet file, or a damaged one: {error}") from error
    tables = {trace.table: trace for trace in traces}
    if not tables or len(tables) < len(traces):
        raise DataError(f"{path}: it has no tables, or one twice; {_MAKE}")
    return TraceProfile(tables, head["source"], path)


def _list(numbers: NDArray[np.int64]) -> pa.Array:
    return pa.LargeListArray.from_arrays(np.array([0, len(numbers)]), numbers).cast(_NUMBERS)


def _head(path: Path, file: pq.ParquetFile) -> dict[str, Any]:
    text = (file.schema_arrow.metadata or {}).get(_KEY)
    if text is None:
        raise DataError(
            f"{path}: no trace profile, but some other Parquet file (its columns: "
            f"{', '.join(file.schema_arrow.names)}); {_MAKE}"
        )
    try:
        head = parse_json(text)
        version, source = head["version"], head["source"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: its metadata is damaged ({error}); {_MAKE}") from error
    if version != _VERSION:
        raise DataError(
            f"{path}: a trace profile of version {version}; this recd reads version {_VERSION}, so "
            "profile the trace anew"
        )
    if not file.schema_arrow.equals(_SCHEMA) or not isinstance(source, str):
        raise DataError(f"{path}: its columns or metadata are none of a trace profile; {_MAKE}")
    return {"source": source}


def _trace(path: Path, table: pa.Table) -> TableTrace:
    if table.num_rows != 1:
        raise DataError(f"{path}: a row group has {table.num_rows} rows, not one; {_MAKE}")
    row = table.combine_chunks().to_batches()[0]
    ids, distances, counts = (row[name].flatten().to_numpy() for name in _LISTS)
    trace = TableTrace(row["feature"][0].as_py(), ids, distances, counts, row["rows"][0].as_py())
    wrong = _fault(trace)
    if wrong:
        raise DataError(f"{path}: table {trace.table}: {wrong}; {_MAKE}")
    return trace


def _fault(trace: TableTrace) -> str | None:
    """What no profile says of a table, where this one does."""
    ids, distances, counts = trace.ids, trace.distances, trace.counts
    if len(distances) != len(counts) or not len(distances) or distances[0] != 0:
        return "distances and counts do not fit each other"
    if (np.diff(distances) <= 0).any() or distances[-1] > len(ids):
        return f"distances do not rise from 0 to at most its {len(ids):,} ids"
    if (counts < 1).any() or counts[0] != len(ids):
        return (
            f"counts are below 1, or {counts[0]:,} accesses are new and there are {len(ids):,} ids"
        )
    if len(np.unique(ids)) < len(ids):
        return "an id stands in it twice"
    if trace.rows < 1:
        return f"it has {trace.rows} rows"
    return None
