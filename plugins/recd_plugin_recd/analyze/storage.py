"""What a table's features take in Parquet: as they are, and what they would take by session."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_recd.source import SessionTable
from recd_plugins.api import SessionKeys
from recd_plugins.api.columns import TableWriter
from recd_plugins.api.tables import Layout


@dataclass(frozen=True)
class StorageEstimate:
    """Bytes of the features of a row.

    Attributes:
        stored: in the files as they are; None where rows come from no Parquet files.
        as_read: neighbouring rows of the table, written anew in the order in which they stand.
        by_session, by_session_dict: the sampled sessions, written by session in the layouts
            ``list`` and ``list_dict``. These three have the settings of ``recd cluster``.
        rows_as_read, rows_by_session: how many rows were written to learn that.
    """

    stored: float | None
    as_read: float
    by_session: float
    by_session_dict: float
    rows_as_read: int
    rows_by_session: int


def stored_bytes(source: SessionTable) -> float | None:
    """Bytes of the features of a row in the files of a table, from their metadata."""
    total = rows = 0
    for file in (file for partition in source.partitions for file in partition.files):
        total += _feature_bytes(file, source.features)
        rows += pq.read_metadata(file).num_rows
    return total / rows if rows else None


def written_bytes(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    features: Sequence[str],
    keys: SessionKeys | None,
    layout: Layout,
) -> float:
    """Bytes of the features of a row when rows are written as ``recd cluster`` does."""
    with tempfile.TemporaryDirectory(prefix="recd-analyze-") as folder:
        path = Path(folder) / "sample.parquet"
        with TableWriter(path, schema, keys=keys, layout=layout) as writer:
            for batch in batches:
                writer.write(batch)
        rows = pq.read_metadata(path).num_rows
        return _feature_bytes(path, features) / rows if rows else 0.0


def _feature_bytes(path: Path, features: Sequence[str]) -> int:
    metadata, wanted, total = pq.read_metadata(path), set(features), 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            path_in_schema = column.path_in_schema
            # A list's values are two levels below it; names may have dots of their own.
            if path_in_schema in wanted or path_in_schema.rsplit(".", 2)[0] in wanted:
                total += column.total_compressed_size
    return total
