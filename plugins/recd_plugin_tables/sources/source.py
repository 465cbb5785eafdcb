"""Tables to read: the interface of sources and the options that open them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa
import pyarrow.types as pt
from pydantic import Field, field_validator

from recd_plugin_tables.columns import unescaped
from recd_plugin_tables.kinds import holds_nothing, plain
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
"""The formats of tables."""

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

    @field_validator("types")
    @classmethod
    def _known(cls, types: dict[str, str]) -> dict[str, str]:
        for name, kind in types.items():
            try:
                pa.type_for_alias(kind)
            except ValueError as error:
                raise ValueError(
                    f"{name}: {kind} is no type; write string, int64, uint64, float64, bool, "
                    "date32 or timestamp[s]"
                ) from error
        return types

    def said(self) -> set[str]:
        """The options that are not as they are by default."""
        return {
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.get_default(call_default_factory=True)
        }


class Source(ABC):
    """A table of a user's, which can be read any number of times.

    Attributes:
        location: what it was opened by, as messages name it.
    """

    location: str

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns as they are written."""

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """How many rows there are, None where reading shows it."""

    @property
    def folder_keys(self) -> tuple[str, ...]:
        """The columns whose values are names of folders, as those of Hive partitions."""
        return ()

    @abstractmethod
    def read(self, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Every row once, in stored order, and where it stands.

        Args:
            columns: of those of ``schema``; None reads all.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What tells this content from other, by what is quick to know: JSON values."""

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """As ``read``, without where rows stand."""
        return (rows.data for rows in self.read(columns))


def check_names(location: str, schema: pa.Schema) -> pa.Schema:
    """The schema, unless two columns of it have one name."""
    for name, count in Counter(schema.names).items():
        if count > 1:
            raise DataError(
                f"{location}: {count} columns are named {name}; which of them is meant cannot be "
                "said, so write the table with other names"
            )
    return schema


@dataclass(frozen=True)
class TrainedColumns:
    """Columns of the table that is trained on, as far as they are known.

    Attributes:
        types: by name, of fields of structs by their path; some may be missing.
        folder_keys: columns that names of folders say.
    """

    types: Mapping[str, pa.DataType]
    folder_keys: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: Source) -> TrainedColumns:
        """Those of a table that is there."""
        return cls(dict(_types(source.schema, "")), source.folder_keys)


class AsTrained(Source):
    """A table, with the types of another one for columns that hold nothing but nulls.

    Args:
        source: the table.
        trained: the columns of the other one.
    """

    def __init__(self, source: Source, trained: TrainedColumns) -> None:
        self._source, self._trained = source, trained.types
        self.location = source.location

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema([self._typed(field, "") for field in self._source.schema])

    def _typed(self, field: pa.Field, above: str) -> pa.Field:
        path, kind = above + field.name, plain(field.type)
        if holds_nothing(kind):
            return field.with_type(self._trained.get(path, field.type))
        if not pt.is_struct(kind):
            return field
        return field.with_type(pa.struct([self._typed(each, f"{path}.") for each in kind]))

    @property
    def num_rows(self) -> int | None:
        return self._source.num_rows

    @property
    def folder_keys(self) -> tuple[str, ...]:
        return self._source.folder_keys

    def read(self, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        for rows in self._source.read(columns):
            schema = pa.schema([self.schema.field(name) for name in rows.data.schema.names])
            yield replace(rows, data=rows.data.cast(schema))

    def identity(self) -> dict[str, Any]:
        return self._source.identity()


def _types(fields: Iterable[pa.Field], above: str) -> Iterator[tuple[str, pa.DataType]]:
    for field in fields:
        kind = plain(field.type)
        yield above + field.name, kind
        if pt.is_struct(kind):
            yield from _types(kind, f"{above}{field.name}.")
