"""Folders of tables that are more than their files, which hold rows that are no longer in them."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.errors import DataError

#: What lies in the folder of a table, and whose it is.
MARKS = {"_delta_log": "Delta", ".hoodie": "Hudi"}


def refuse_table(root: str, below: Sequence[str]) -> None:
    """Refuse a file or folder that says that it lies in such a table.

    Args:
        root: the location that is read.
        below: the parts of its path below it.

    Raises:
        DataError: names the folder of the table.
    """
    for at, part in enumerate(below):
        snapshot = part == "metadata" and below[-1].endswith(".metadata.json")
        kind = MARKS.get(part) or ("Iceberg" if snapshot and at == len(below) - 2 else None)
        if kind is not None:
            raise DataError(
                f"{'/'.join([root.rstrip('/'), *below[:at]])}: a table of {kind}, whose files may "
                "hold rows that are not in it any more: recd init reads tables of Delta and "
                "Iceberg as they are; else write its rows as Parquet"
            )


def tables_above(path: str) -> list[str]:
    """Folders above a partition, as day=1, of the table that it may be a part of."""
    found, folder = [], path.rstrip("/")
    while "=" in folder.rpartition("/")[2]:
        folder = folder.rpartition("/")[0]
        found.append(folder)
    return found
