"""Sorts a partition with Spark, on this machine; the rows are those of the embedded engine.

Spark reads and sorts, and writes plain Parquet. The files are then written once more, streaming, by
the writer of the other engine: same layouts, row groups and statistics.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_recd.cluster.sort import (
    Layouts,
    kept_rows,
    part_name,
    plain_schema,
    table_writer,
)
from recd_plugin_recd.source import ParquetSource, Partition, SessionTable
from recd_plugins.api import DataError, SetupError, is_list_dict, optional_library, to_lists

if TYPE_CHECKING:
    from recd_plugin_recd.cluster.options import ClusterOptions, Progress

#: Bytes of input files for one range of the output.
_RANGE_BYTES = 128 << 20
#: Read back at once.
_BATCH_ROWS = 2048
_FILE, _ROW = "__recd_file", "__recd_row"
#: How Spark starts the names of files, with one slash or with three.
_URI = re.compile("^file:/+")


class SparkEngine:
    """Sorts one partition of ``source`` into Parquet files.

    Args:
        scratch: a folder for what Spark writes.
    """

    def __init__(
        self,
        source: SessionTable,
        partition: Partition,
        options: ClusterOptions,
        scratch: Path,
    ) -> None:
        if not isinstance(source, ParquetSource):
            raise DataError(f"{source.path}: --engine spark reads Parquet; leave it out")
        self._source, self._partition, self._options = source, partition, options
        self._schema = plain_schema(source.schema)
        self._scratch = scratch

    def run(self, layouts: Layouts | None, progress: Progress) -> tuple[Path, Layouts | None]:
        """Sort into files ``part-*.parquet``; return their folder and the layouts of features."""
        sorted_folder, parts = self._scratch / "spark", self._scratch / "parts"
        parts.mkdir(parents=True)
        start_session(self._options.memory)
        with _spark_errors(self._options.source):
            self._sort(sorted_folder)
        progress(self._partition.num_rows or 0, 0)
        files = [file for file in sorted(sorted_folder.glob("*.parquet")) if _num_rows(file)]
        for number, file in enumerate(files):
            path = parts / part_name(number)
            with table_writer(
                path, self._schema, self._source.keys, self._options, layouts
            ) as writer:
                for batch in self._batches(file):
                    writer.write(batch)
                    progress(0, batch.num_rows)
            layouts = writer.layouts
            file.unlink()
        return parts, layouts

    def _sort(self, folder: Path) -> None:
        """Have Spark write the sorted rows, one file for each range of sessions."""
        from pyspark.sql import functions as sql

        keys, files = self._source.keys, self._partition.files
        session, time = (sql.col(f"`{name}`") for name in (keys.session, keys.timestamp))
        stored = start_session(self._options.memory).read.parquet(
            *(str(file.resolve()) for file in files)
        )
        # Ties keep the order of the input: that of the files, then the row in the file.
        paths = {local_path(uri): _URI.sub("file:/", uri) for uri in stored.inputFiles()}
        order = sql.array(*(sql.lit(paths[file.resolve()]) for file in files))
        place = sql.regexp_replace(sql.col("_metadata.file_path"), _URI.pattern, "file:/")
        rows = stored.select(
            *(sql.col(f"`{name}`") for name in self._schema.names),
            sql.array_position(order, place).alias(_FILE),
            sql.col("_metadata.row_index").alias(_ROW),
        )
        self._check_values(rows)
        size = sum(file.stat().st_size for file in files)
        (
            rows.repartitionByRange(1 + size // _RANGE_BYTES, session)
            .sortWithinPartitions(session, time, sql.col(_FILE), sql.col(_ROW))
            .drop(_FILE, _ROW)
            # What is fast to write: these files are read once.
            .write.option("parquet.enable.dictionary", "false")
            .parquet(str(folder.resolve()), compression="snappy")
        )

    def _check_values(self, rows: Any) -> None:
        """Refuse a session or a time that is null, or a time that is NaN."""
        from pyspark.sql import functions as sql

        keys = self._source.keys
        missing = sql.lit(False)
        for name in (keys.session, keys.timestamp):
            missing = missing | sql.col(f"`{name}`").isNull()
            if pa.types.is_floating(self._source.schema.field(name).type):
                missing = missing | sql.isnan(sql.col(f"`{name}`"))
        found = rows.filter(missing).select(_FILE, _ROW).orderBy(_FILE, _ROW).limit(1).collect()
        if found:
            file = self._partition.files[found[0][0] - 1]
            raise DataError(
                f"{file}: row {found[0][1]} (from 0), column {keys.session!r} or "
                f"{keys.timestamp!r}: null or NaN; every row needs a session and a time"
            )

    def _batches(self, file: Path) -> Iterator[pa.RecordBatch]:
        """The rows of a file of Spark's with the types of the input, features as lists."""
        rows = min(_BATCH_ROWS, self._options.row_group_rows)
        with pq.ParquetFile(file) as stored:
            for batch in stored.iter_batches(rows):
                columns = []
                for field in self._source.schema:
                    column = batch.column(field.name)
                    if is_list_dict(field):
                        columns.append(to_lists(column))
                    else:
                        columns.append(column.cast(field.type))
                plain = pa.record_batch(columns, schema=self._schema)
                yield kept_rows(plain, self._source.keys, self._options)


def _num_rows(file: Path) -> int:
    return int(pq.read_metadata(file).num_rows)


def start_session(memory: int) -> Any:
    """The Spark of this process."""
    builder = optional_library("pyspark.sql", "spark", "--engine spark").SparkSession.builder
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=f"{home}/bin" if home else None) is None:
        raise SetupError(
            "--engine spark needs Java 17 or newer: install a JRE, or point JAVA_HOME at one"
        )
    return (
        builder.appName("recd cluster")
        .master("local[*]")
        .config("spark.driver.memory", f"{max(512, memory >> 20)}m")
        .config("spark.driver.host", "localhost")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.caseSensitive", "true")
        .config("spark.sql.legacy.parquet.nanosAsLong", "true")
        .config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )


def stop_session() -> None:
    """End the Spark of this process, if there is one."""
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        running.stop()


def local_path(uri: str) -> Path:
    """The file that Spark names so."""
    return Path(unquote(urlparse(uri).path))


@contextmanager
def _spark_errors(source: Path) -> Iterator[None]:
    """What Spark raises as a DataError, by the first line of its long message."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        cause = [line for line in lines if line.startswith("Caused by")]
        raise DataError(f"{source}: Spark failed: {(cause or lines)[-1].strip()}") from error
