"""Reads and writes traces and trace profiles, and reads traces from registry datasets."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recd_plugin_dlrm.trace.generator import StackDistances, TableTrace, TraceGenerator
from recd_plugins.api import DataError, file_utils, text_utils

if TYPE_CHECKING:
    from recd_plugins.api import FeatureLookups, RunConfig

_LINES = 1 << 20  # lines to read at a time

#: Adjacent rows of the data: int64 ids by feature, in lookup order, and the number of rows.
TraceRows = tuple[Mapping[str, NDArray[np.int64]], int]


def read_text(path: Path, columns: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    """Yield ids of a text file, int64 ``[n, max(1, len(columns))]`` per piece. Also reads .gz."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            while lines := list(islice(file, _LINES)):
                ids = pa.array(" ".join(lines).split(), pa.string()).cast(pa.int64()).to_numpy()
                num_rows = sum(not line.isspace() for line in lines)
                if columns and len(ids) != num_rows * len(columns):
                    raise DataError(
                        f"{path}: {num_rows:,} lines contain {len(ids):,} ids in total, but "
                        f"--columns names {len(columns)} per line. Name every column in --columns."
                    )
                yield ids.reshape(-1, max(1, len(columns)))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the file cannot be read as integer ids: {error}") from error


def text_pieces(
    path: Path, columns: Sequence[str], features: Sequence[str], rows: int | None
) -> Iterator[TraceRows]:
    """Yield the ids of each feature from the first ``rows`` lines of a text file, in pieces."""
    places = {name: columns.index(name) if columns else 0 for name in features}
    left = rows
    for numbers in read_text(path, columns):
        taken = numbers[:left]
        ids = {name: np.ascontiguousarray(taken[:, place]) for name, place in places.items()}
        yield ids, len(taken)
        if left is not None:
            left -= len(taken)
            if left == 0:
                return


def registry_pieces(
    registry: RunConfig, features: Sequence[str], rows: int | None
) -> Iterator[TraceRows]:
    """Yield the ids of each feature from a registry's training split, after preprocessing."""
    from recd_plugins.api import prepared_data, row_tables

    lookups = prepared_data.RegistryLookups(registry)
    for batch in row_tables.training_rows(registry, rows):
        found = lookups.of(batch, features)
        yield {name: _in_order(found[name]) for name in features}, len(batch)


def _in_order(lookups: FeatureLookups) -> NDArray[np.int64]:
    """Return the ids of all rows in order. A deduplicated list is repeated for each of its rows."""
    if lookups.inverse is None:
        return lookups.ids
    lists = pa.LargeListArray.from_arrays(lookups.offsets.astype(np.int64), lookups.ids)
    return lists.take(pa.array(lookups.inverse)).flatten().to_numpy()


def choose(tables: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the tables that match any of the patterns, or all tables if there are no patterns."""
    for pattern in patterns:
        if not any(fnmatchcase(table, pattern) for table in tables):
            near = text_utils.did_you_mean(pattern, list(tables))
            near = near or f". Use one of: {', '.join(map(repr, tables))}."
            raise DataError(f"--tables {pattern!r} matches no table{near}")
    return [
        table for table in tables if not patterns or any(fnmatchcase(table, p) for p in patterns)
    ]


@dataclass(frozen=True, eq=False)
class TraceProfile:
    """Profiles of several tables, keyed by table name, with the source and the profile file."""

    tables: Mapping[str, TableTrace]
    source: str
    path: Path | None = None


def profile_pieces(
    pieces: Iterable[TraceRows],
    features: Sequence[str],
    source: str,
    progress: Callable[[int], None],
) -> TraceProfile:
    """Profile the traces of ``features``; each feature has its own table."""
    found = {name: StackDistances() for name in features}
    rows = 0
    for ids, num_rows in pieces:
        for name, distances in found.items():
            distances.add(ids[name])
        rows += num_rows
        progress(num_rows)
    if empty := [name for name, distances in found.items() if not distances.accesses]:
        raise DataError(
            f"{source}: feature {empty[0]!r} has no ids in its {rows:,} rows. Exclude its table "
            "with --tables."
            if rows
            else f"{source}: the dataset has no rows. Use another one."
        )
    traces = [distances.trace(name, rows) for name, distances in found.items()]
    return TraceProfile({trace.table: trace for trace in traces}, source)


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


def write_profile(profile: TraceProfile, path: Path) -> None:
    """Write a profile as Parquet, with one row group per table."""
    head = json.dumps({"version": _VERSION, "source": profile.source})
    schema = _SCHEMA.with_metadata({_KEY: head})
    with (
        file_utils.new_file(path) as temporary,
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


def _list(numbers: NDArray[np.int64]) -> pa.Array:
    return pa.LargeListArray.from_arrays(np.array([0, len(numbers)]), numbers).cast(_NUMBERS)


def read_profile(path: Path) -> TraceProfile:
    """Read a file of ``write_profile``."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            head = json.loads((file.schema_arrow.metadata or {}).get(_KEY, "{}"))
            if head.get("version") != _VERSION:
                raise DataError(
                    f"{path}: the file is not a trace profile of version {_VERSION}. Create one "
                    "with recd trace profile SOURCE -o FILE."
                )
            groups = range(file.metadata.num_row_groups)
            traces = [_trace(file.read_row_group(group)) for group in groups]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: the file cannot be read as Parquet: {error}") from error
    return TraceProfile({trace.table: trace for trace in traces}, head["source"], path)


def _trace(table: pa.Table) -> TableTrace:
    (row,) = table.combine_chunks().to_batches()
    ids, distances, counts = (row[name].flatten().to_numpy() for name in _LISTS)
    return TableTrace(row["feature"][0].as_py(), ids, distances, counts, row["rows"][0].as_py())


#: Key of a synthetic trace's JSON in the Parquet metadata.
PROVENANCE = b"recd_plugin_dlrm.trace"
# Rows to generate at a time, and rows per Parquet row group.
_ROWS = 1 << 18


def write_trace(
    path: Path,
    generators: Sequence[TraceGenerator],
    accesses: int,
    provenance: Mapping[str, Any],
    progress: Callable[[int], None],
) -> None:
    """Generate traces of ``accesses`` ids each, as columns of Parquet or lines of text."""
    fields = [pa.field(each.profile.feature, pa.int64(), nullable=False) for each in generators]
    schema = pa.schema(fields, metadata={PROVENANCE: json.dumps(dict(provenance))})
    with file_utils.new_file(path) as temporary, ExitStack() as stack:
        writer: Any
        if path.suffix == ".parquet":
            writer = pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=False)
        else:
            compression = "gzip" if path.suffix == ".gz" else None
            sink = stack.enter_context(pa.output_stream(str(temporary), compression=compression))
            options = pv.WriteOptions(include_header=False, delimiter=" ")
            writer = pv.CSVWriter(sink, schema, write_options=options)
        stack.enter_context(writer)
        for first in range(0, accesses, _ROWS):
            size = min(_ROWS, accesses - first)
            columns = [pa.array(each.draw(size)) for each in generators]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
            progress(size)
