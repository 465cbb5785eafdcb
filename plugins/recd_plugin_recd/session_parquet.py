"""The dataset plugin ``recd.session_parquet``, which reads Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.types as pt
from pydantic import Field, NonNegativeInt

from recd_plugin_recd.papercal_table import (
    TableOptions,
    provenance,
    provenance_of,
    write_table,
)
from recd_plugins.api import (
    Condition,
    DataError,
    Dataset,
    FeatureSchema,
    PluginOptions,
    Reader,
    Rows,
    SessionKeys,
    Split,
    Storage,
    list_dict,
    object_stores,
    parquet,
    progress_bars,
    readers,
)

_LISTS = pa.list_(pa.int64())


class SessionParquet(Dataset):
    """Reads Parquet files of training samples, ideally with adjacent rows per session.

    With the option ``generate``, it first generates a synthetic table.
    """

    name = "recd.session_parquet"
    # Options whose effect is already part of the identity or the schema.
    free_options = frozenset(
        {"path", "test_path", "storage", "prefetch", "generate", "sparse", "dense"}
    )
    row_options = frozenset({"where", "shuffle", "seed"})

    class Options(PluginOptions):
        path: Path | object_stores.Url = Field(
            description="A Parquet file, a folder with *.parquet files at any depth, or a URL of "
            "a file or folder, such as s3://bucket/folder (any fsspec scheme)."
        )
        test_path: Path | object_stores.Url | None = Field(
            default=None, description="Path or URL of the test split; null for no test split."
        )
        storage: Storage = Field(default=Storage(), description="Options for reading from a URL.")
        where: list[Condition] = Field(
            default=[],
            description="Conditions [column, op, value] that every row must meet.",
        )
        session: str = Field(default="session_id", description="Column of the session id.")
        timestamp: str = Field(default="ts", description="Column of the time.")
        label: str = Field(default="label", description="Column of the label, 0 or 1.")
        sparse: list[str] | None = Field(
            default=None,
            description="Names or patterns (such as usr_*) of the id columns. null: all columns "
            "with lists of integers.",
        )
        dense: list[str] | None = Field(
            default=None,
            description="Names or patterns of the number columns. null: all float columns.",
        )
        shuffle: bool = Field(default=False, description="Shuffle row groups in each epoch.")
        seed: int = Field(default=0, ge=0, description="Seed of shuffle.")
        prefetch: NonNegativeInt = Field(
            default=4,
            description="Number of batches to prefetch in a thread; 0 disables prefetching.",
        )
        generate: TableOptions | None = Field(
            default=None, description="Generate a table with these options if path does not exist."
        )

    options: Options
    #: The training dataset, if this dataset is only scored; else None.
    _trained: SessionParquet | None = None

    def prepare(self) -> None:
        if self.options.generate is not None:
            self._generate(self.options.generate)
        for split in self.splits():
            self._columns(self._table_of(split))

    def identity(self) -> dict[str, Any]:
        return {split: self._table_of(split).contents() for split in self.splits()}

    def schema(self) -> FeatureSchema:
        """Return the names of the sparse features, the dense features and the label."""
        if self._trained is not None:
            return self._trained.schema()
        if self.trained_schema is not None:
            return self.trained_schema
        table = self._table
        own = {name: getattr(self.options, name) for name in ("session", "timestamp", "label")}
        for option, column in own.items():
            if column not in table.schema.names:
                raise DataError(
                    f"{table.locations[0]}: there is no column {column!r}. Set the option "
                    f"{option!r} to one of: {', '.join(map(repr, table.schema.names))}."
                )
        free = [field for field in table.schema if field.name not in own.values()]
        sparse = self._choose("sparse", free, _is_ids, _is_feature)
        dense = self._choose("dense", free, _is_number, _is_float)
        if both := set(sparse) & set(dense):
            raise DataError(
                f"{table.locations[0]}: columns {', '.join(map(repr, sorted(both)))} match both "
                "the option 'sparse' and the option 'dense'. Remove each column from one of these "
                "options."
            )
        label = table.schema.field(self.options.label)
        if not _is_number(label):
            raise DataError(
                f"{table.locations[0]}: label column {label.name!r} has the type {label.type}, but "
                "labels must be numbers. Set the option 'label' to another column."
            )
        return FeatureSchema(sparse, dense, label.name)

    def left_out(self) -> dict[str, str]:
        schema = self.schema()
        used = {*schema.sparse, *schema.dense, schema.label, *self._own_keys}
        return {
            field.name: f"{field.type}: "
            + next(
                (f"not in the option {option!r}" for option, can in _CAN.items() if can(field)),
                "the type is not supported",
            )
            for field in self._table.schema
            if field.name not in used
        }

    def splits(self) -> tuple[Split, ...]:
        return ("train",) if self.options.test_path is None else ("train", "test")

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        columns = self._columns(self._table_of(split))
        return self._reader(columns, rank, world_size, batch_size, split)

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        columns = self._with_keys(split, [self.options.session])
        return self._reader(columns, rank, world_size, batch_size, split)

    def _reader(
        self, columns: pa.Schema, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        table, options = self._table_of(split), self.options
        data: dict[str, Any] = {"split": split, "files": readers.digest(table.identity())}
        if options.where:
            data["where"] = [str(each) for each in options.where]
        shuffle = options.shuffle and split == "train"
        return readers.PlannedReader(
            readers.ReadPlan(table.units, batch_size, shuffle=shuffle, seed=options.seed),
            lambda pieces: self._labelled(table.read(pieces, columns)),
            data=data,
            what=str(table.root),
            rank=rank,
            world_size=world_size,
            ahead=options.prefetch,
        )

    @property
    def _own_keys(self) -> tuple[str, str]:
        return self.options.session, self.options.timestamp

    def session_keys(self) -> SessionKeys | None:
        """Return the names of the session and time columns. None if a column is missing."""
        return SessionKeys(*self._own_keys) if len(self.keys()) == 2 else None

    def keys(self) -> dict[str, str]:
        """Return session and time columns to copy to prediction files, as ``{name: name}``."""
        return {name: name for name in self._own_keys if name in self._table.schema.names}

    def scan(self, split: Split = "train") -> Iterator[Rows]:
        """Yield all rows of a split, with the session and time columns."""
        table = self._table_of(split)
        keys = list(self._own_keys if self._trained is None else self.keys())
        pieces = (readers.Piece(unit, 0, unit.num_rows) for unit in table.units)
        return self._labelled(table.read(pieces, self._with_keys(split, keys)))

    def _labelled(self, rows: Iterator[Rows]) -> Generator[Rows, None, None]:
        """Yield the rows. For scoring, add a label column of zeros in place of real labels."""
        for each in rows:
            if self._trained is None:
                yield each
                continue
            data = each.data
            zeros = pa.nulls(len(data), pa.int8()).fill_null(0)
            names = [*data.schema.names, self.schema().label]
            data = pa.RecordBatch.from_arrays([*data.columns, zeros], names=names)
            yield Rows(data, each.origins)

    def to_score(self, location: str) -> SessionParquet:
        own: dict[str, Any] = {"test_path": None, "where": [], "generate": None, "shuffle": False}
        values = {**self.options.model_dump(), "path": location, **own}
        scored = type(self)(type(self.options).model_validate(values))
        scored._trained = self
        return scored

    def _with_keys(self, split: Split, keys: list[str]) -> pa.Schema:
        """Return the schema of the columns to read: training columns and ``keys``."""
        table = self._table_of(split)
        columns = self._columns(table)
        for name in keys:
            columns = columns.append(self._field(table, name, lambda _: True, ""))
        return columns

    def _table_of(self, split: Split) -> parquet.ParquetTable:
        return self._table if split == "train" else self._test_table

    @cached_property
    def _table(self) -> parquet.ParquetTable:
        return self._open(self.options.path)

    @cached_property
    def _test_table(self) -> parquet.ParquetTable:
        if self.options.test_path is None:
            raise DataError(
                "recd.session_parquet: there is no test split. Set the option 'test_path'."
            )
        return self._open(self.options.test_path)

    def _open(self, path: Path | str) -> parquet.ParquetTable:
        options = self.options
        return parquet.ParquetTable(path, options.storage, where=options.where)

    def _choose(
        self,
        option: str,
        fields: Sequence[pa.Field],
        allowed: Callable[[pa.Field], bool],
        by_default: Callable[[pa.Field], bool],
    ) -> tuple[str, ...]:
        patterns: list[str] | None = getattr(self.options, option)
        if patterns is None:
            return tuple(field.name for field in fields if by_default(field))
        where = self._table.locations[0]
        for pattern in patterns:
            if not any(fnmatchcase(field.name, pattern) for field in fields):
                raise DataError(
                    f"{where}: {pattern!r} in the option {option!r} matches no column. Use names "
                    "or patterns of these columns: "
                    f"{', '.join(repr(field.name) for field in fields)}."
                )
        chosen = [
            field
            for field in fields
            if any(fnmatchcase(field.name, pattern) for pattern in patterns)
        ]
        for field in chosen:
            if not allowed(field):
                raise DataError(
                    f"{where}: column {field.name!r} has the type {field.type}, which the option "
                    f"{option!r} does not support. Remove the column from this option."
                )
        return tuple(field.name for field in chosen)

    def _columns(self, table: parquet.ParquetTable) -> pa.Schema:
        """Return the schema of the columns to read for training. Ids are int64."""
        schema = self.schema()
        label = () if self._trained is not None else (schema.label,)
        ids = [_as_int64(self._field(table, name, _is_ids, "ids")) for name in schema.sparse]
        numbers = [
            self._field(table, name, _is_number, "numbers") for name in (*schema.dense, *label)
        ]
        return pa.schema([*ids, *numbers])

    def _field(
        self, table: parquet.ParquetTable, name: str, allowed: Callable[[pa.Field], bool], what: str
    ) -> pa.Field:
        trained = (self._trained or self).options.path
        if name not in table.schema.names:
            raise DataError(
                f"{table.locations[0]}: there is no column {name!r}, which the training data "
                f"{trained} has. Add the column."
            )
        field = table.schema.field(name)
        if not allowed(field):
            raise DataError(
                f"{table.locations[0]}: column {name!r} has the type {field.type}, but contains "
                f"{what} in the training data {trained}. Convert the column to {what}."
            )
        return field

    def _generate(self, wanted: TableOptions) -> None:
        path = self.options.path
        if isinstance(path, str):
            raise DataError(
                f"{path}: the option 'generate' cannot write to a URL. Set the option 'path' to a "
                "local folder, or remove 'generate'."
            )
        if not path.exists():
            with progress_bars.row_progress(f"generating {path.name}", wanted.rows) as advance:
                write_table(path, wanted, advance)
        found = provenance(path)
        if found != provenance_of(wanted):
            raise DataError(
                f"{path}: the table was generated with {found}, but the option 'generate' is "
                f"{provenance_of(wanted)}. Remove the table, or set the option 'path' to another "
                "folder."
            )


def _as_int64(field: pa.Field) -> pa.Field:
    if pt.is_integer(field.type):
        return field.with_type(pa.int64())
    # Lists of int64 and list_dict columns are read without a conversion.
    ids = list_dict.is_list_dict(field) or (
        pt.is_list(field.type) and pt.is_int64(field.type.value_type)
    )
    return field if ids else field.with_type(_LISTS)


def _is_feature(field: pa.Field) -> bool:
    kind = field.type
    is_list = pt.is_list(kind) or pt.is_large_list(kind)
    return list_dict.is_list_dict(field) or (is_list and pt.is_integer(kind.value_type))


def _is_ids(field: pa.Field) -> bool:
    return pt.is_integer(field.type) or _is_feature(field)


def _is_number(field: pa.Field) -> bool:
    return pt.is_integer(field.type) or pt.is_floating(field.type) or pt.is_boolean(field.type)


def _is_float(field: pa.Field) -> bool:
    return bool(pt.is_floating(field.type))


#: Options that select features, and the check of a column that an option accepts.
_CAN = {"sparse": _is_ids, "dense": _is_number}
