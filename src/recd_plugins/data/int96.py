"""Times that Parquet stores in 96 bits, as Spark and Impala do; Arrow reads them as nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugins.errors import DataError

_ROWS = 65_536


def int96_columns(metadata: pq.FileMetaData) -> list[str]:
    """Names of the columns that hold such times, at any depth."""
    schema = metadata.schema
    columns = map(schema.column, range(metadata.num_columns))
    paths = [each.path for each in columns if each.physical_type == "INT96"]
    if not paths:
        return []
    names = schema.to_arrow_schema().names
    return [name for name in names if any(f"{path}.".startswith(f"{name}.") for path in paths)]


def check_int96(
    source: Any, metadata: pq.FileMetaData, group: int, names: Sequence[str], where: object
) -> None:
    """Refuse times of a row group that nanoseconds do not reach: Arrow makes others of them.

    Args:
        source: the file, as pyarrow opens it.
        metadata: its footer.
        group: the row group.
        names: columns that hold such times.
        where: the file, for errors.

    Raises:
        DataError: one is before 1677 or after 2262; names its column.
    """
    schema = metadata.schema.to_arrow_schema()
    with pq.ParquetFile(
        source,
        metadata=metadata,
        coerce_int96_timestamp_unit="us",
        page_checksum_verification=True,
        pre_buffer=False,
    ) as file:
        for name in names:
            kind = schema.field(name).type
            for batch in file.iter_batches(
                _ROWS, row_groups=[group], columns=[name], use_threads=False
            ):
                try:
                    batch.column(name).cast(kind)
                except pa.ArrowInvalid as error:
                    raise DataError(
                        f"{where}: row group {group}, column {name}: a time before 1677 or after "
                        "2262 is stored as INT96, of which Arrow would make another one; write it "
                        "as TIMESTAMP_MICROS (Spark: spark.sql.parquet.outputTimestampType)"
                    ) from error
