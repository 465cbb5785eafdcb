"""Sources that libraries read: DuckDB, Hugging Face, Iceberg, Delta and Lance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from recd_plugin_tables.sources.files import STREAM_END
from recd_plugin_tables.sources.source import BATCH_ROWS, Source, check_names
from recd_plugins.api import DataError, Origin, RecdError, Rows, imports


class BatchSource(Source):
    """Base class of tables that a library reads. ``errors`` are exceptions for damaged tables."""

    def __init__(self, location: str, errors: tuple[type[Exception], ...]) -> None:
        self.location = location
        self._errors = (*errors, pa.ArrowException, OSError)

    @abstractmethod
    def read_schema(self) -> pa.Schema:
        """Return the schema of the table."""

    @abstractmethod
    def read_batches(self, columns: list[str]) -> Iterable[pa.RecordBatch]:
        """Yield all rows of the table, with the given columns."""

    @property
    def num_rows(self) -> int | None:
        return None

    @cached_property
    def schema(self) -> pa.Schema:
        with self._told():
            return check_names(self.location, self.read_schema().remove_metadata())

    def read(self, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        names = self.schema.names if columns is None else list(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        first_row = 0
        with self._told():
            for batch in self.read_batches(names):
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    data = batch.slice(start, BATCH_ROWS).select(names).cast(schema)
                    yield Rows(data, (Origin(self.location, first_row, data.num_rows),))
                    first_row += data.num_rows

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Convert errors of the library to ``DataError`` with the location of the table."""
        try:
            yield
        except RecdError:
            raise
        except self._errors as error:
            raise DataError(f"{self.location}: the table cannot be read: {error}") from error


class DeltaSource(BatchSource):
    """The latest version of a Delta table."""

    def __init__(self, location: str) -> None:
        deltalake = imports.optional_library("deltalake", "delta", location)
        super().__init__(
            location,
            (imports.optional_library("deltalake.exceptions", "delta", location).DeltaError,),
        )
        with self._told():
            self._table = deltalake.DeltaTable(location)
            mapped = self._table.metadata().configuration.get("delta.columnMapping.mode", "none")
        if mapped != "none":
            raise DataError(
                f"{location}: the Delta table uses column mapping (delta.columnMapping.mode: "
                f"{mapped}), which the deltalake reader does not support. Write a copy without "
                "column mapping."
            )

    def identity(self) -> dict[str, Any]:
        return {
            "format": "delta",
            "id": self._table.metadata().id,
            "version": self._table.version(),
        }

    def read_schema(self) -> pa.Schema:
        return self._table.to_pyarrow_dataset().schema

    def read_batches(self, columns: list[str]) -> Iterable[pa.RecordBatch]:
        dataset = self._table.to_pyarrow_dataset()
        return dataset.to_batches(columns=columns, batch_size=BATCH_ROWS)


#: Settings that restrict queries and views to reading this one file.
_SETTINGS = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "lock_configuration": "true",
}


class DuckDbSource(BatchSource):
    """A table in a DuckDB file, or the result of a query on the file.

    Args:
        location: path of the database file.
        table: name of the table, optionally with its schema; None if there is only one table.
        query: a SELECT to use instead of a table. Without ORDER BY the row order is undefined.
    """

    def __init__(self, location: str, table: str | None, query: str | None) -> None:
        duckdb = imports.optional_library("duckdb", "duckdb", location)
        super().__init__(location, (duckdb.Error,))
        if table is not None and query is not None:
            raise DataError(
                f"{location}: source.table and source.query cannot be combined. Remove one of the "
                "options."
            )
        self._duckdb = duckdb
        with self._told():
            self._query = (query or "").strip().rstrip(";")
            self._query = self._query or f"SELECT * FROM {self._chosen(table)}"

    @contextmanager
    def _connect(self) -> Iterator[Any]:
        try:
            config = dict(_SETTINGS)
            with self._duckdb.connect(self.location, read_only=True, config=config) as database:
                yield database
        except self._duckdb.PermissionException as error:
            what = str(error).partition("\n")[0]  # the next lines show the position in the query
            raise DataError(
                f"{self.location}: the query or view reads files outside the database, which is "
                f"not allowed ({what}). Copy these files into a table with CREATE TABLE ... AS "
                "SELECT."
            ) from error

    @cached_property
    def num_rows(self) -> int | None:
        counted = f"SELECT count(*) FROM (\n{self._query}\n)"
        with self._told(), self._connect() as database:
            return int(database.execute(counted).fetchone()[0])

    def identity(self) -> dict[str, Any]:
        # DuckDB keeps recent commits in a separate file until it merges them.
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
        return ".".join(map(_quoted, names[_chosen(self.location, "table", names, table)]))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _reader(database: Any, query: str) -> Any:
    relation = database.sql(query)
    # DuckDB 2 and 1.
    read = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
    return read(BATCH_ROWS)


def _chosen(location: str, option: str, names: Collection[str], name: str | None) -> str:
    """Return the table or split ``name``, or the only one if ``name`` is None."""
    if name is None and len(names) == 1:
        return next(iter(names))
    if name is None or name not in names:
        if not names:
            raise DataError(f"{location}: the source has no {option}. Use another source.")
        asked = f"there is no {option} {name!r}" if name else f"the source has several {option}s"
        raise DataError(
            f"{location}: {asked}. Set source.table to one of: {', '.join(map(repr, names))}."
        )
    return name


#: Prefix of a dataset on the hub: hf://datasets/user/name or hf://user/name.
HUB = "hf://"


class HuggingFaceSource(BatchSource):
    """A split of a Hugging Face dataset, in a folder of ``save_to_disk`` or at ``hf://NAME``."""

    def __init__(self, location: str, split: str | None) -> None:
        super().__init__(location, (ValueError, KeyError))
        datasets = imports.optional_library("datasets", "huggingface", location)
        with self._told():
            if location.startswith(HUB):
                name = location.removeprefix(HUB).removeprefix("datasets/").strip("/")
                found = datasets.load_dataset(name)
            else:
                found = datasets.load_from_disk(location)
        if isinstance(found, datasets.DatasetDict):
            found = found[_chosen(location, "split", list(found), split)]
        self._dataset = found

    @property
    def num_rows(self) -> int | None:
        return int(self._dataset.num_rows)

    def identity(self) -> dict[str, Any]:
        files = [Path(file["filename"]) for file in self._dataset.cache_files]
        sizes = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return {"format": "huggingface", "rows": self.num_rows, "files": sizes}

    def read_schema(self) -> pa.Schema:
        return self._dataset.features.arrow_schema

    def read_batches(self, columns: list[str]) -> Iterable[pa.RecordBatch]:
        for file in self._dataset.cache_files:
            with pa.memory_map(file["filename"]) as stored:
                end = stored.read_at(len(STREAM_END), stored.size() - len(STREAM_END))
            if end != STREAM_END:
                raise DataError(
                    f"{self.location}: the file {file['filename']} is truncated. Save or download "
                    "the dataset again."
                )
        chosen = self._dataset.select_columns(columns).with_format("arrow")
        for table in chosen.iter(batch_size=BATCH_ROWS):
            yield from table.combine_chunks().to_batches()


#: Prefix of a table in a catalog that pyiceberg is configured for: iceberg://catalog/ns.name.
CATALOG = "iceberg://"


class IcebergSource(BatchSource):
    """A snapshot of an Iceberg table: a folder, a metadata file, or ``iceberg://CATALOG/NAME``."""

    def __init__(self, location: str) -> None:
        catalogs = imports.optional_library("pyiceberg.catalog", "iceberg", location)
        tables = imports.optional_library("pyiceberg.table", "iceberg", location)
        # pyiceberg's errors have no common base class.
        super().__init__(location, (Exception,))
        with self._told():
            if location.startswith(CATALOG):
                catalog, _, name = location.removeprefix(CATALOG).partition("/")
                self._table = catalogs.load_catalog(catalog).load_table(name)
            else:
                self._table = tables.StaticTable.from_metadata(_metadata_file(location))

    @cached_property
    def num_rows(self) -> int | None:
        snapshot = self._table.current_snapshot()
        if snapshot is None:
            return 0
        total = snapshot.summary.additional_properties.get("total-records")
        deletes = snapshot.summary.additional_properties.get("total-delete-files", "0")
        return int(total) if total is not None and deletes == "0" else None

    def identity(self) -> dict[str, Any]:
        snapshot = self._table.current_snapshot()
        return {
            "format": "iceberg",
            "id": str(self._table.metadata.table_uuid),
            "snapshot": snapshot.snapshot_id if snapshot else None,
            "schema": self._table.metadata.current_schema_id,
        }

    def read_schema(self) -> pa.Schema:
        return self._table.scan().to_arrow_batch_reader().schema

    def read_batches(self, columns: list[str]) -> Iterable[pa.RecordBatch]:
        return self._table.scan(selected_fields=tuple(columns)).to_arrow_batch_reader()


def _metadata_file(location: str) -> str:
    """Return the newest metadata file in the folder of an Iceberg table."""
    if location.endswith(".metadata.json"):
        return location
    folder = Path(location) / "metadata"
    files = list(folder.glob("*.metadata.json"))
    hint = folder / "version-hint.text"
    if hint.is_file():
        number = hint.read_text().strip()
        files = [f for f in files if f.name == f"v{number}.metadata.json"] or files
    if not files:
        raise DataError(
            f"{location}: the folder has no metadata/*.metadata.json, so it is not an Iceberg "
            "table. Correct the path."
        )
    return str(max(files, key=lambda file: (_version(file.name), file.stat().st_mtime_ns)))


def _version(name: str) -> int:
    digits = name.removeprefix("v").partition("-")[0].partition(".")[0]
    return int(digits) if digits.isdecimal() else -1


class LanceSource(BatchSource):
    """The latest version of a Lance dataset."""

    def __init__(self, location: str) -> None:
        super().__init__(location, (ValueError,))
        lance = imports.optional_library("lance", "lance", location)
        with self._told():
            self._dataset = lance.dataset(location)

    @cached_property
    def num_rows(self) -> int | None:
        return int(self._dataset.count_rows())

    def identity(self) -> dict[str, Any]:
        files = sorted(
            [file.path, file.file_size_bytes]
            for fragment in self._dataset.get_fragments()
            for file in fragment.data_files()
        )
        return {"format": "lance", "version": self._dataset.version, "files": files}

    def read_schema(self) -> pa.Schema:
        return self._dataset.schema

    def read_batches(self, columns: list[str]) -> Iterable[pa.RecordBatch]:
        return self._dataset.to_batches(columns=columns, scan_in_order=True)
