"""Access profiles: how often each row of some tables is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recd_plugins.interfaces.access.table_access import TableAccess
from recd_plugins.runtime.errors import DataError
from recd_plugins.runtime.files import check_regular, new_file

_KEY = b"recd_plugins.access_profile"
_VERSION = 1
# Attributes of a table in the metadata of a file; files of earlier versions lack the last two.
_KEPT = ("features", "num_embeddings", "samples", "total", "error", "dedupe_factor", "batch_size")


# Arrays have no one truth value, so profiles are compared by identity.
@dataclass(frozen=True, eq=False)
class AccessProfile:
    """How often the rows of some tables are read.

    Attributes:
        tables: by name.
        source: where the counts come from, in words.
        path: of the file that it was loaded from, if any.
    """

    tables: Mapping[str, TableAccess]
    source: str
    path: Path | None = None

    @classmethod
    def load(cls, path: str | Path) -> AccessProfile:
        """Read the Parquet file of a profile.

        Raises:
            DataError: the file is missing, damaged or no profile.
        """
        return _read(Path(path))

    def save(self, path: str | Path) -> None:
        """Write a Parquet file, whole or not at all.

        It has a line for each known row, table after table, and the rest as JSON metadata.

        Raises:
            RecdError: the place cannot be written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        head: dict[str, Any] = {"version": _VERSION, "source": self.source, "tables": []}
        tables: list[pa.Table] = []
        for name, table in self.tables.items():
            known = {key: value for key, value in vars(table).items() if key in _KEPT}
            head["tables"].append({**known, "table": name, "known_rows": len(table.rows)})
            names = pa.DictionaryArray.from_arrays(
                np.zeros(len(table.rows), np.int32), pa.array([name])
            )
            columns = [names, pa.array(table.rows), pa.array(table.accesses)]
            tables.append(pa.table(columns, names=["table", "row", "accesses"]))
        lines = pa.concat_tables(tables).unify_dictionaries()
        with new_file(Path(path)) as temporary:
            pq.write_table(
                lines.replace_schema_metadata({_KEY: json.dumps(head)}),
                temporary,
                compression="zstd",
                use_dictionary=["table", "accesses"],
                column_encoding={"row": "DELTA_BINARY_PACKED"},
                write_page_checksum=True,
            )

    def merge(self, other: AccessProfile) -> AccessProfile:
        """What both have seen together; a table that only one has is taken as it is.

        Raises:
            DataError: a table has other features or another number of rows in the other.
        """
        tables = dict(self.tables)
        for name, table in other.tables.items():
            tables[name] = tables[name].merge(table) if name in tables else table
        return AccessProfile(tables, f"{self.source}; {other.source}")

    def bounded(self, bound: int) -> AccessProfile:
        """The same with at most ``bound`` known rows a table; see ``TableAccess.bounded``."""
        tables = {name: table.bounded(bound) for name, table in self.tables.items()}
        return AccessProfile(tables, self.source)

    def covering(self, table: str, num_embeddings: int) -> TableAccess:
        """The profile of a table of so many rows.

        Raises:
            DataError: there is none, or it is of a table with another number of rows.
        """
        found = self.tables.get(table)
        name = f"the access profile {f'{self.path} ' if self.path else ''}of {self.source}"
        if found is None:
            raise DataError(
                f"{name} does not cover table {table}; its tables: "
                f"{', '.join(self.tables) or 'none'}. Make one with recd profile registry"
            )
        if found.num_embeddings != num_embeddings:
            raise DataError(
                f"{name} has table {table} with "
                f"{found.num_embeddings:,} rows, and the model's has {num_embeddings:,}; profile "
                "the data anew with recd profile registry"
            )
        return found


def _read(path: Path) -> AccessProfile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_regular(path)
        lines = pq.read_table(path, page_checksum_verification=True, partitioning=None)
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file; make it with recd profile registry REGISTRY -o {path}"
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: no Parquet file, or a damaged one: {error}") from error
    metadata = lines.schema.metadata or {}
    if _KEY not in metadata:
        raise DataError(f"{path}: no access profile; make one with recd profile registry")
    head = json.loads(metadata[_KEY])
    if head["version"] != _VERSION:
        raise DataError(
            f"{path}: an access profile of version {head['version']}; this recd reads version "
            f"{_VERSION}, so profile the data anew"
        )
    rows, accesses = (lines[name].to_numpy() for name in ("row", "accesses"))
    tables, start = {}, 0
    for each in head["tables"]:
        known = slice(start, start := start + each["known_rows"])
        kept = {key: each[key] for key in _KEPT if key in each}
        kept["features"] = tuple(kept["features"])
        tables[each["table"]] = TableAccess(
            table=each["table"], rows=rows[known], accesses=accesses[known], **kept
        )
    if start != len(rows):
        raise DataError(
            f"{path}: it has {len(rows):,} lines, and its metadata says {start:,}: make it anew"
        )
    return AccessProfile(tables, head["source"], path)
