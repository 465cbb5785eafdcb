"""``recd logs read``: the records of a log as a Parquet file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recd_plugin_recd.logs.consumer import Consumer
from recd_plugin_recd.logs.damage import Report
from recd_plugin_recd.logs.manifest import MANIFEST
from recd_plugin_recd.logs.parquet_file import ParquetFile, provenance
from recd_plugin_recd.logs.shard_files import shard_files
from recd_plugins.api import DataError
from recd_plugins.api.files import check_writable, real_path


@dataclass(frozen=True)
class Exported:
    """What an export wrote: 0 rows and no file where there was nothing new."""

    num_rows: int
    was_there: bool = False


def export_log(
    source: Path,
    destination: Path,
    *,
    offsets: Path | None,
    force: bool,
    report: Report,
    progress: Callable[[int], None],
) -> Exported:
    """Write what is in the log, or what is new in it since ``offsets``, to a Parquet file.

    The file appears when it is complete, and only then the offsets move. Its footer says which
    records it has: a run that was killed between the two is made good by running it again.

    Raises:
        DataError: ``destination`` exists and ``force`` is not given, or is part of the log; no log,
            no place to write.
    """
    shards = shard_files(source)
    for other in (offsets, *shards, shards[0].parent / MANIFEST):
        if other is not None and real_path(destination) == real_path(other):
            raise DataError(f"{destination} is what is read; name another file for the rows")
    if offsets is not None:
        check_writable(offsets)
    consumer = Consumer(source, offsets, report)
    start = consumer.state()
    if force and destination.is_file() and provenance(destination) is None:
        raise DataError(
            f"{destination} was not exported from a log, so --force does not replace it; name "
            "another file"
        )
    if destination.exists() and not force:
        written = provenance(destination) if offsets is not None else None
        if written is None or written.get("from") != start:
            raise DataError(f"{destination} exists already; --force replaces it")
        consumer.load(written["to"])
        consumer.commit()
        return Exported(written["rows"], was_there=True)
    with ParquetFile(destination, consumer.schema) as file:
        for found in consumer:
            file.write(found.rows)
            progress(found.rows.num_rows)
        if file.num_rows or offsets is None:
            file.close({"from": start, "to": consumer.state(), "rows": file.num_rows})
    if offsets is not None:
        consumer.commit()
    return Exported(file.num_rows)
