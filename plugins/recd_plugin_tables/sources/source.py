"""The interface of table sources, and the options to open them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, field_validator

from recd_plugin_tables.kinds import unescaped
from recd_plugins.api import DataError, PluginOptions, Rows, Storage

Format = Literal[
    "parquet",
    "csv",
    "tsv",
    "jsonl",
    "arrow",
    "huggingface",
    "iceberg",
    "delta",
    "lance",
    "duckdb",
]

#: Maximum number of rows in a batch.
BATCH_ROWS = 65_536


class SourceOptions(PluginOptions):
    """Options for opening a table, such as its format, query or storage."""

    format: Format | None = Field(
        default=None, description="Format of the table; null detects it from the name and content."
    )
    table: str | None = Field(
        default=None,
        description="Which table of a DuckDB file or Iceberg catalog, or which split of a"
        " Hugging Face dataset.",
    )
    query: str | None = Field(
        default=None, description="One SELECT on a DuckDB file. Its result is the table."
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        max_length=1,
        description="Column separator of text files; null means a comma for .csv and a "
        "tab for .tsv.",
    )
    decimal: Literal[".", ","] = Field(default=".", description="Decimal separator in CSV and TSV.")
    header: tuple[str, ...] | None = Field(
        default=None,
        description="Column names of text files without a header line; null reads them "
        "from the first line.",
    )
    types: dict[str, str] = Field(
        default={},
        description="Types of text columns, such as string, int64 or float64, if they "
        "cannot be inferred from the first rows.",
    )
    storage: Storage = Field(default=Storage(), description="Storage options for a URL.")

    @field_validator("separator", mode="before")
    @classmethod
    def _unescaped(cls, separator: Any) -> Any:
        return unescaped(separator)

    @field_validator("query")
    @classmethod
    def _one_select(cls, query: str | None) -> str | None:
        """Reject a query that is not one SELECT. DuckDB parses the query but does not run it."""
        if query is None:
            return None
        try:
            import duckdb
        except ImportError:  # Opening the table raises an error that explains how to install it.
            return query
        try:
            kinds = [statement.type.name for statement in duckdb.extract_statements(query)]
        except duckdb.Error as error:
            what = str(error).partition("\n")[0]
            raise ValueError(f"DuckDB cannot parse the query: {what}") from error
        if kinds != ["SELECT"]:
            raise ValueError(
                f"the query is {', '.join(kinds) or 'empty'}, but must be one SELECT statement"
            )
        return query


class Source(ABC):
    """Base class of tables to import; can be read repeatedly. Messages use ``location``."""

    location: str
    #: Whether the column names are the first line of a text file.
    names_in_first_line: bool = False
    #: Whether empty texts are read as null.
    empty_is_null: bool = False

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Names and types of the columns, as stored."""

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """Number of rows, or None if the whole table must be read to count them."""

    @abstractmethod
    def read(self, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield all rows in stored order. ``columns`` defaults to all columns."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return JSON values that change if the content changes, without reading all rows."""

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows like ``read``, as Arrow batches without row positions."""
        return (rows.data for rows in self.read(columns))


def check_names(location: str, schema: pa.Schema) -> pa.Schema:
    """Return ``schema``, or raise an error if column names are duplicated."""
    for name, count in Counter(schema.names).items():
        if count > 1:
            raise DataError(
                f"{location}: {count} columns have the name {name!r}. Write the table with unique "
                "column names."
            )
    return schema
