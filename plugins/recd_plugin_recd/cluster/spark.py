"""Sorts a partition with local Spark. The result equals that of the embedded engine.

Spark sorts the rows into plain Parquet files. Then they are rewritten by the writer of the embedded
engine, with the same layouts, row groups and statistics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_recd.cluster.sort import (
    ClusterOptions,
    Layouts,
    Progress,
    kept_rows,
    part_name,
    table_writer,
)
from recd_plugin_recd.sessions import (
    ParquetSource,
    Partition,
    SessionTable,
    check_keys,
    plain_schema,
)
from recd_plugins.api import DataError, imports, list_dict

#: Input bytes per range of the output.
_RANGE_BYTES = 128 << 20
_BATCH_ROWS = 2048


def sort_with_spark(
    source: SessionTable,
    partition: Partition,
    options: ClusterOptions,
    scratch: Path,
    layouts: Layouts | None,
    progress: Progress,
) -> tuple[Path, Layouts | None]:
    """Sort a partition. Arguments and result are those of ``sort_partition``."""
    if not isinstance(source, ParquetSource):
        raise DataError(
            f"{source.path}: --engine spark reads only Parquet files. Use --engine embedded for a "
            "registry file."
        )
    keys, sorted_folder, parts = source.keys, scratch / "spark", scratch / "parts"
    for rows in source.read(partition, [keys.session, keys.timestamp]):
        check_keys(rows, keys)
    builder = imports.optional_library(
        "pyspark.sql", "spark", "--engine spark"
    ).SparkSession.builder
    try:
        _sort(_started(builder, options.memory), source, partition, sorted_folder)
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        raise DataError(
            f"{options.source}: Spark failed with the error {first!r}. Fix the cause, or use "
            "--engine embedded."
        ) from error
    progress(partition.num_rows or 0, 0)
    parts.mkdir(parents=True)
    schema = plain_schema(source.schema)
    files = [
        file for file in sorted(sorted_folder.glob("*.parquet")) if pq.read_metadata(file).num_rows
    ]
    for number, file in enumerate(files):
        path = parts / part_name(number)
        with (
            pq.ParquetFile(file) as stored,
            table_writer(path, schema, keys, options, layouts) as writer,
        ):
            for batch in stored.iter_batches(min(_BATCH_ROWS, options.row_group_rows)):
                columns = [
                    list_dict.to_lists(batch.column(field.name))
                    if list_dict.is_list_dict(field)
                    else batch.column(field.name).cast(field.type)
                    for field in source.schema
                ]
                kept = kept_rows(pa.record_batch(columns, schema=schema), keys, options)
                writer.write(kept)
                progress(0, kept.num_rows)
        layouts = writer.layouts
        file.unlink()
    return parts, layouts


def _started(builder: Any, memory: int) -> Any:
    """Return the Spark session of this process. The first call starts it."""
    settings = {
        "spark.driver.memory": f"{max(512, memory >> 20)}m",
        "spark.driver.host": "localhost",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.caseSensitive": "true",
        "spark.sql.legacy.parquet.nanosAsLong": "true",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.session.timeZone": "UTC",
    }
    return builder.appName("recd cluster").master("local[*]").config(map=settings).getOrCreate()


def _sort(spark: Any, source: SessionTable, partition: Partition, folder: Path) -> None:
    """Let Spark sort a partition into Parquet files in ``folder``, one per range of sessions."""
    from pyspark.sql import functions as sql

    session, time = (sql.col(f"`{name}`") for name in (source.keys.session, source.keys.timestamp))
    size = sum(file.stat().st_size for file in partition.files)
    stored = spark.read.parquet(*(str(file.resolve()) for file in partition.files))
    # Ties keep the input order: first by file, then by row.
    file, row = "__recd_file", "__recd_row"
    rows = stored.select(
        *(sql.col(f"`{name}`") for name in source.schema.names),
        sql.col("_metadata.file_path").alias(file),
        sql.col("_metadata.row_index").alias(row),
    )
    (
        rows.repartitionByRange(1 + size // _RANGE_BYTES, session)
        .sortWithinPartitions(session, time, file, row)
        .drop(file, row)
        # Fast to write: these files are read only once.
        .write.option("parquet.enable.dictionary", "false")
        .parquet(str(folder.resolve()), compression="snappy")
    )
