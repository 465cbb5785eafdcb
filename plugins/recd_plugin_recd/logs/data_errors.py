"""Errors of one row of a batch, or of a column."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from recd_plugins.api import DataError

if TYPE_CHECKING:
    from recd_plugins.api import Rows


class ColumnError(DataError):
    """A column cannot be logged, whatever its rows."""


class RowError(DataError):
    """A row cannot be logged. ``row`` counts in the batch, from 0."""

    def __init__(self, row: int, message: str) -> None:
        self.row = row
        self.message = message
        super().__init__(f"row {row} (from 0): {message}")


@contextmanager
def naming_source(path: Path) -> Iterator[None]:
    """What is wrong with a column is said with where it comes from."""
    try:
        yield
    except ColumnError as error:
        raise DataError(f"{path}: {error}") from error


@contextmanager
def naming_files(rows: Rows) -> Iterator[None]:
    """What is wrong with a row of ``rows`` is said with its file and its row there."""
    try:
        yield
    except RowError as error:
        path, row = rows.origin_of(error.row)
        raise DataError(f"{path}: row {row} (from 0): {error.message}") from error
