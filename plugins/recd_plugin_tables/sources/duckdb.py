"""Tables of a DuckDB file, and results of queries, by duckdb."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from recd_plugin_tables.sources.batch_source import BatchSource
from recd_plugin_tables.sources.source import BATCH_ROWS
from recd_plugins.api import DataError, optional_library

#: A query, or a view in the file, can read this one file and nothing else, and cannot write.
_SETTINGS = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "lock_configuration": "true",
}


class DuckDbSource(BatchSource):
    """A table of a DuckDB file, or the result of a query over that file.

    Args:
        location: the file of the database.
        table: its name, maybe with the schema; None where there is one.
        query: one SELECT, in place of a table (``SourceOptions`` checks that it is one). Without
            ORDER BY its rows may come in any order.

    Raises:
        DataError: there is no such table, or the query is wrong.
        SetupError: duckdb is not installed.
    """

    def __init__(self, location: str, table: str | None, query: str | None) -> None:
        duckdb = optional_library("duckdb", "duckdb", location)
        super().__init__(location, (duckdb.Error,))
        if table is not None and query is not None:
            raise DataError(f"{location}: source.table and source.query are two; choose one")
        if not Path(location).is_file():
            raise DataError(f"{location}: no such file")
        self._duckdb = duckdb
        try:
            self._query = (query or "").strip().rstrip(
                ";"
            ) or f"SELECT * FROM {self._chosen(table)}"
        except duckdb.Error as error:
            raise self._damaged(error) from error

    def _connect(self) -> Any:
        return self._duckdb.connect(self.location, read_only=True, config=dict(_SETTINGS))

    def _damaged(self, error: Exception) -> Exception:
        if isinstance(error, self._duckdb.PermissionException):
            what = str(error).partition("\n")[0]  # its place in the query follows
            return DataError(
                f"{self.location}: the query or view reads other files ({what}), which is not "
                "allowed; copy them with CREATE TABLE ... AS SELECT, or export to Parquet"
            )
        return super()._damaged(error)

    @cached_property
    def num_rows(self) -> int | None:
        counted = f"SELECT count(*) FROM (\n{self._query}\n)"
        try:
            with self._connect() as database:
                return int(database.execute(counted).fetchone()[0])
        except self._duckdb.Error as error:
            raise self._damaged(error) from error

    def identity(self) -> dict[str, Any]:
        # What was committed last stands in a file of its own until DuckDB moves it.
        files = [Path(f"{self.location}{suffix}") for suffix in ("", ".wal")]
        found = [file.stat() if file.is_file() else None for file in files]
        return {
            "format": "duckdb",
            "query": self._query,
            "files": [stat and [stat.st_size, stat.st_mtime_ns] for stat in found],
        }

    def read_schema(self) -> pa.Schema:
        with self._connect() as database:
            return _reader(database, f"SELECT * FROM (\n{self._query}\n) LIMIT 0").schema

    def read_batches(self, columns: list[str]) -> Iterable[pa.RecordBatch]:
        names = ", ".join(map(_quoted, columns))
        with self._connect() as database:
            yield from _reader(database, f"SELECT {names} FROM (\n{self._query}\n)")

    def _chosen(self, table: str | None) -> str:
        with self._connect() as database:
            found = database.execute(
                "SELECT table_schema, table_name FROM information_schema.tables ORDER BY ALL"
            ).fetchall()
        names = {
            name if schema == "main" else f"{schema}.{name}": (schema, name)
            for schema, name in found
        }
        if table is None and len(names) == 1:
            (table,) = names
        if table is None or table not in names:
            asked = f"no table {table}" if table else "several tables" if names else "no table"
            raise DataError(
                f"{self.location}: {asked}; set source: {{table: NAME}} to one of "
                f"{', '.join(names) or 'none'}, or source: {{query: SELECT ...}}"
            )
        return ".".join(map(_quoted, names[table]))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _reader(database: Any, query: str) -> Any:
    relation = database.sql(query)
    # As DuckDB 2 calls it, and as 1 does.
    read = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
    return read(BATCH_ROWS)
