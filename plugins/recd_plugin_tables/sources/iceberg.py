"""Iceberg tables, by pyiceberg: a folder, or one of a catalog."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from recd_plugin_tables.sources.batch_source import BatchSource
from recd_plugins.api import DataError, optional_library

#: Names a table of a catalog, which pyiceberg's own configuration knows: iceberg://catalog/ns.name.
SCHEME = "iceberg://"


class IcebergSource(BatchSource):
    """An Iceberg table as its current snapshot has it.

    Args:
        location: the folder of a table, the file of its metadata, or ``iceberg://CATALOG/NAME``.

    Raises:
        DataError: it is none.
        SetupError: pyiceberg is not installed.
    """

    def __init__(self, location: str) -> None:
        catalogs = optional_library("pyiceberg.catalog", "iceberg", location)
        tables = optional_library("pyiceberg.table", "iceberg", location)
        # Its errors have no base of their own.
        super().__init__(location, (ValueError, RuntimeError, KeyError, NotImplementedError))
        try:
            if location.startswith(SCHEME):
                catalog, _, name = location.removeprefix(SCHEME).partition("/")
                self._table = catalogs.load_catalog(catalog).load_table(name)
            else:
                self._table = tables.StaticTable.from_metadata(_metadata_file(location))
        except Exception as error:
            raise self._damaged(error) from error

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
    """The newest metadata of a table's folder."""
    if location.endswith(".metadata.json"):
        return location
    folder = Path(location) / "metadata"
    files = list(folder.glob("*.metadata.json"))
    hint = folder / "version-hint.text"
    if hint.is_file():
        number = hint.read_text().strip()
        files = [f for f in files if f.name == f"v{number}.metadata.json"] or files
    if not files:
        raise DataError(f"{location}: no metadata/*.metadata.json, as an Iceberg table has it")
    return str(max(files, key=lambda file: (_version(file.name), file.stat().st_mtime_ns)))


def _version(name: str) -> int:
    """The number that names of metadata begin with: 00003-..., or v3..."""
    digits = name.removeprefix("v").partition("-")[0].partition(".")[0]
    return int(digits) if digits.isdecimal() else -1
