"""Sources: tables to read, and the options that open them."""

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

#: Rows of a batch, at most.
BATCH_ROWS = 65_536


class SourceOptions(PluginOptions):
    """How a table is opened, where its name and content do not say it all."""

    format: Format | None = Field(
        default=None, description="What the table is; null goes by its name and content."
    )
    table: str | None = Field(
        default=None,
        description="Which table of a DuckDB file or of an Iceberg catalog, or which split of a "
        "Hugging Face dataset.",
    )
    query: str | None = Field(
        default=None, description="One SELECT whose result is the table; for DuckDB."
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        max_length=1,
        description="Between the columns of text; null: a comma in .csv, a tab in .tsv.",
    )
    decimal: Literal[".", ","] = Field(
        default=".", description="Before the fraction of numbers in CSV and TSV."
    )
    header: tuple[str, ...] | None = Field(
        default=None,
        description="Names of the columns of text whose first line is a row; null: it names them.",
    )
    types: dict[str, str] = Field(
        default={},
        description="Types of columns of text, as string, int64 or float64, where the first rows "
        "do not show them.",
    )
    storage: Storage = Field(default=Storage(), description="How the store of a URL is reached.")

    @field_validator("separator", mode="before")
    @classmethod
    def _unescaped(cls, separator: Any) -> Any:
        return unescaped(separator)

    @field_validator("query")
    @classmethod
    def _one_select(cls, query: str | None) -> str | None:
        """Refuse anything but one SELECT. DuckDB parses the text here and runs nothing."""
        if query is None:
            return None
        try:
            import duckdb
        except ImportError:  # opening the table says how to install it
            return query
        try:
            kinds = [statement.type.name for statement in duckdb.extract_statements(query)]
        except duckdb.Error as error:
            what = str(error).partition("\n")[0]
            raise ValueError(f"DuckDB cannot parse it: {what}") from error
        if kinds != ["SELECT"]:
            raise ValueError(f"must be one SELECT, not {', '.join(kinds) or 'empty'}")
        return query


class Source(ABC):
    """A table, which can be read any number of times; ``location`` names it in messages."""

    location: str

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns as they are stored."""

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """The number of rows, None if only reading shows it."""

    @property
    def folder_keys(self) -> tuple[str, ...]:
        """Columns whose values are names of folders, as of Hive partitions."""
        return ()

    @abstractmethod
    def read(self, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield every row once, in stored order, with these columns of ``schema`` or all."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what tells this content from other and is quick to know, as JSON values."""

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows without their places."""
        return (rows.data for rows in self.read(columns))


def check_names(location: str, schema: pa.Schema) -> pa.Schema:
    """Return the schema; refuse two columns of one name."""
    for name, count in Counter(schema.names).items():
        if count > 1:
            raise DataError(
                f"{location}: {count} columns are named {name}; which of them is meant cannot be "
                "said, so write the table with other names"
            )
    return schema
