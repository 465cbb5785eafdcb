"""Access profiles: how often each row of some tables is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recd_plugins.access.table_access import TableAccess
from recd_plugins.errors import DataError


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
            DataError: the file is missing, damaged or no profile; says what is wrong.
        """
        from recd_plugins.access.profile_file import read_tables

        tables, source = read_tables(Path(path))
        return cls(tables, source, Path(path))

    def save(self, path: str | Path) -> None:
        """Write a Parquet file, whole or not at all, in place of one that is there.

        Raises:
            RecdError: the place cannot be written.
        """
        from recd_plugins.access.profile_file import write_tables

        write_tables(self.tables, self.source, Path(path))

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
