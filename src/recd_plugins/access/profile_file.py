"""The Parquet file of an access profile.

Columns ``table``, ``row`` and ``accesses``, one line for each row that is known, table after table,
most read first; no row group has lines of two tables. What is known of a table as a whole stands in
the file's metadata, as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recd_plugins.access.table_access import TableAccess
from recd_plugins.errors import DataError
from recd_plugins.files import check_regular, new_file

_KEY = b"recd_plugins.access_profile"
_VERSION = 1
_LINES = 1 << 20
_SCHEMA = pa.schema(
    [
        pa.field("table", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("accesses", pa.float64(), nullable=False),
    ]
)

_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")

    table: str
    features: tuple[str, ...]
    num_embeddings: int = Field(ge=1)
    samples: int = Field(ge=1)
    known_rows: int = Field(ge=0)
    total: _Finite
    error: _Finite
    dedupe_factor: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    batch_size: int | None = Field(default=None, ge=1)


class _Head(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int
    source: str
    tables: list[_Table]


def write_tables(tables: Mapping[str, TableAccess], source: str, path: Path) -> None:
    """Write the tables of a profile, whole or not at all.

    Raises:
        RecdError: the place cannot be written.
    """
    head = _Head(
        version=_VERSION,
        source=source,
        tables=[
            _Table(
                table=name,
                features=table.features,
                num_embeddings=table.num_embeddings,
                samples=table.samples,
                known_rows=len(table.rows),
                total=table.total,
                error=table.error,
                dedupe_factor=table.dedupe_factor,
                batch_size=table.batch_size,
            )
            for name, table in tables.items()
        ],
    )
    schema = _SCHEMA.with_metadata({_KEY: head.model_dump_json().encode()})
    with (
        new_file(path) as temporary,
        pq.ParquetWriter(
            temporary,
            schema,
            compression="zstd",
            use_dictionary=["table", "accesses"],
            column_encoding={"row": "DELTA_BINARY_PACKED"},
            write_page_checksum=True,
        ) as writer,
    ):
        for name, table in tables.items():
            for first in range(0, len(table.rows), _LINES):
                lines = slice(first, first + _LINES)
                writer.write_batch(_batch(name, table.rows[lines], table.accesses[lines], schema))


def _batch(
    name: str, rows: NDArray[np.int64], accesses: NDArray[np.float64], schema: pa.Schema
) -> pa.RecordBatch:
    names = pa.DictionaryArray.from_arrays(np.zeros(len(rows), np.int32), pa.array([name]))
    return pa.record_batch([names, pa.array(rows), pa.array(accesses)], schema=schema)


def read_tables(path: Path) -> tuple[dict[str, TableAccess], str]:
    """Read the tables of a profile and their source, and check all of it.

    Raises:
        DataError: the file is missing, damaged or no profile; says where, and what is wrong.
    """
    try:
        check_regular(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            head = _head(path, file)
            tables = dict(_tables(path, file, head))
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file; make it with recd profile registry REGISTRY -o {path}"
        ) from error
    except OSError as error:
        # Arrow's own errors of damaged pages are OSErrors too.
        raise DataError(f"{path}: cannot be read: {error}") from error
    except pa.ArrowException as error:
        raise DataError(f"{path}: no Parquet file, or a damaged one: {error}") from error
    return tables, head.source


def _head(path: Path, file: pq.ParquetFile) -> _Head:
    metadata = file.schema_arrow.metadata or {}
    if _KEY not in metadata:
        raise DataError(
            f"{path}: no access profile, but some other Parquet file (its columns: "
            f"{', '.join(file.schema_arrow.names)}); make a profile with recd profile registry"
        )
    try:
        head = _Head.model_validate_json(metadata[_KEY])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: its metadata: {where}: {first['msg']}") from error
    if head.version != _VERSION:
        raise DataError(
            f"{path}: an access profile of version {head.version}; this recd reads version "
            f"{_VERSION}, so profile the data anew"
        )
    if not file.schema_arrow.equals(_SCHEMA):
        raise DataError(
            f"{path}: its columns are {_columns(file.schema_arrow)}; those of an access profile "
            f"are {_columns(_SCHEMA)}"
        )
    return head


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _tables(path: Path, file: pq.ParquetFile, head: _Head) -> Iterator[tuple[str, TableAccess]]:
    groups = file.metadata.num_row_groups
    expected = sum(table.known_rows for table in head.tables)
    if file.metadata.num_rows != expected:
        raise DataError(
            f"{path}: it has {file.metadata.num_rows:,} lines, and its metadata says {expected:,}"
        )
    if len({table.table for table in head.tables}) < len(head.tables):
        raise DataError(f"{path}: its metadata has one table twice")
    group = 0
    for table in head.tables:
        rows = np.empty(table.known_rows, np.int64)
        accesses = np.empty(table.known_rows, np.float64)
        filled = 0
        while filled < table.known_rows and group < groups:
            lines = file.read_row_group(group)
            _check_names(path, table.table, group, lines)
            end = filled + len(lines)
            if end > table.known_rows:
                break
            rows[filled:end] = lines["row"].to_numpy()
            accesses[filled:end] = lines["accesses"].to_numpy()
            filled, group = end, group + 1
        if filled != table.known_rows:
            raise DataError(
                f"{path}: table {table.table}: {table.known_rows:,} rows are expected, and the "
                "row groups have other numbers of them"
            )
        _check(path, table, rows, accesses)
        yield (
            table.table,
            TableAccess(
                table.table,
                table.features,
                table.num_embeddings,
                table.samples,
                rows,
                accesses,
                table.total,
                table.error,
                table.dedupe_factor,
                table.batch_size,
            ),
        )


def _check_names(path: Path, table: str, group: int, lines: pa.Table) -> None:
    for column in lines.columns:
        if column.null_count:
            raise DataError(f"{path}: row group {group}: a null, which no profile has")
    names = set(lines["table"].unique().to_pylist())
    if names != {table}:
        raise DataError(
            f"{path}: row group {group} is of table {' and '.join(sorted(names))}; expected "
            f"{table}, by the order of the metadata"
        )


def _check(
    path: Path, table: _Table, rows: NDArray[np.int64], accesses: NDArray[np.float64]
) -> None:
    """Refuse what no profile says of a table, with the first line that does."""

    def fault(wrong: NDArray[np.bool_], words: str) -> None:
        if wrong.any():
            line = int(wrong.argmax())
            raise DataError(
                f"{path}: table {table.table}, line {line} of it (from 0): row {rows[line]} with "
                f"{accesses[line]:g} accesses; {words}"
            )

    outside = (rows < 0) | (rows >= table.num_embeddings)
    fault(outside, f"the table has rows 0 to {table.num_embeddings - 1}")
    fault(~np.isfinite(accesses) | (accesses < 0), "accesses are 0 or more")
    rising = np.zeros(len(rows), bool)
    np.greater(accesses[1:], accesses[:-1], out=rising[1:])
    fault(rising, "lines stand most read first, and the one before has fewer")
    if _has_duplicates(rows, table.num_embeddings):
        raise DataError(f"{path}: table {table.table}: a row stands in it twice")
    if table.batch_size is None and table.dedupe_factor > 1:
        raise DataError(
            f"{path}: table {table.table}: its metadata has a dedupe factor of "
            f"{table.dedupe_factor:g} and no batch_size, so all rows were counted"
        )
    known = float(accesses.sum())
    if known > table.total * (1 + 1e-9):
        raise DataError(
            f"{path}: table {table.table}: its rows have {known:,.0f} accesses, and its metadata "
            f"says {table.total:,.0f} in all"
        )


def _has_duplicates(rows: NDArray[np.int64], num_embeddings: int) -> bool:
    if num_embeddings > 16 * len(rows):
        return len(np.unique(rows)) < len(rows)
    seen = np.zeros(num_embeddings, bool)
    seen[rows] = True
    return int(np.count_nonzero(seen)) < len(rows)
