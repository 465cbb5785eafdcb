"""Reads tables with sessions, hashes session ids, and checks session and time columns."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray
from pydantic import ValidationError

from recd_plugins.api import (
    DataError,
    Dataset,
    Rows,
    SessionKeys,
    arrow,
    file_utils,
    list_dict,
    parquet,
    readers,
    text_utils,
)

Nulls = Literal["error", "empty"]

_GOLDEN = 0x9E3779B97F4A7C15


def plain_sessions(sessions: Any) -> Any:
    """Convert session ids to an Arrow array of integers, strings or bytes.

    Raises DataError if the ids have another type, or are fractional numbers.
    """
    if pt.is_dictionary(sessions.type):
        sessions = sessions.cast(sessions.type.value_type)
    kind = sessions.type
    if pt.is_fixed_size_binary(kind):
        return sessions.cast(pa.binary())
    if pt.is_floating(kind) or pt.is_decimal(kind) or pt.is_boolean(kind):
        try:
            return sessions.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise DataError(
                f"session ids must be whole numbers within int64 ({error}). Use a column of "
                "integers or strings."
            ) from error
    if not (pt.is_integer(kind) or is_text(kind)):
        raise DataError(
            f"session ids have the type {kind}, which is not supported. Use a column of integers "
            "or strings."
        )
    return sessions


def is_text(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a string or binary type."""
    checks = (pt.is_string, pt.is_large_string, pt.is_binary, pt.is_large_binary)
    return any(check(kind) for check in checks)


def session_hashes(sessions: Any, seed: int = 0) -> NDArray[np.uint64]:
    """Return a hash of each session id, uint64 ``[rows]``. Equal on all machines and versions.

    Integers are hashed with splitmix64, and texts with BLAKE2b and splitmix64.
    """
    sessions = plain_sessions(sessions)
    if pt.is_integer(sessions.type):
        bits = sessions.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
    else:
        encoded = sessions.dictionary_encode()
        known = np.array([_text_bits(each.as_py()) for each in encoded.dictionary], np.uint64)
        bits = known[encoded.indices.to_numpy()]
    return _splitmix64(bits ^ np.uint64(seed * _GOLDEN % 2**64))


def session_shards(sessions: Any, num_shards: int) -> NDArray[np.int64]:
    """Return the shard of each row, int64 ``[rows]``: session hash modulo ``num_shards``."""
    return (session_hashes(sessions) % np.uint64(num_shards)).astype(np.int64)


def check_keys(rows: Rows, keys: SessionKeys) -> None:
    """Check the session and time columns of rows.

    Raises DataError if a value is null, a time is NaN, or a session id is a fractional number.
    """
    check_no_nulls(rows, keys.session)
    check_no_nulls(rows, keys.timestamp)
    times = rows.data.column(keys.timestamp)
    if pt.is_floating(times.type) and np.isnan(times.to_numpy()).any():
        row = int(np.isnan(times.to_numpy()).argmax())
        raise DataError(
            f"{row_place(rows, row)}, column {keys.timestamp!r} is NaN. Fill in the time, or "
            "remove the row."
        )
    try:
        plain_sessions(rows.data.column(keys.session))
    except DataError as error:
        where = f"{rows.origin_of(0)[0]}: column {keys.session!r}"
        raise DataError(f"{where}: {error}") from error


def check_no_nulls(rows: Rows, name: str) -> None:
    """Raise DataError if the session or time column ``name`` contains a null."""
    row = rows.data.column(name).is_null().index(True).as_py()
    if row >= 0:
        raise DataError(
            f"{row_place(rows, row)}, column {name!r} is null. Fill in the value, or remove the "
            "row."
        )


def without_nulls(rows: Rows, features: Sequence[str], nulls: Nulls) -> Rows:
    """Replace null lists in the columns ``features`` by empty lists.

    Raises DataError if a list contains a null, or a list is null and ``nulls`` is ``error``.
    """
    data = rows.data
    for name in features:
        column, field = data[name], data.schema.field(name)
        stored = list_dict.is_list_dict(field)
        if not stored and not (pt.is_list(field.type) or pt.is_large_list(field.type)):
            continue
        if column.null_count and nulls == "error":
            raise DataError(
                f"{arrow.place(rows, name, column.is_null().index(True).as_py())}: "
                "the list is null. Write an empty list instead, or use --nulls empty."
            )
        if not stored and column.flatten().null_count:
            row = next(
                row for row, each in enumerate(column) if each.values and each.values.null_count
            )
            raise DataError(
                f"{arrow.place(rows, name, row)}: the list contains a null. Remove nulls from the "
                "lists."
            )
        if column.null_count:
            lists = list_dict.to_lists(column) if stored else column
            filled = lists.fill_null(pa.scalar([], lists.type))
            data = data.set_column(data.schema.get_field_index(name), name, filled)
    return replace(rows, data=data)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema with list<int64> instead of the layout list_dict."""
    lists = pa.list_(pa.int64())
    return pa.schema(
        [pa.field(each.name, lists) if list_dict.is_list_dict(each) else each for each in schema]
    )


def plain_rows(rows: Rows, schema: pa.Schema) -> pa.RecordBatch:
    """Convert rows to a schema that ``plain_schema`` returned."""
    columns = []
    for field in schema:
        column = rows.data.column(field.name)
        if list_dict.is_list_dict(rows.data.schema.field(field.name)):
            try:
                column = list_dict.to_lists(column)
            except ValueError as error:
                raise arrow.broken_list(rows, field.name) from error
        columns.append(column.cast(field.type))
    return pa.record_batch(columns, schema=schema)


def row_place(rows: Rows, row: int) -> str:
    """Return the file and the row number in the file as text, for messages."""
    path, number = rows.origin_of(row)
    return f"{path}: row {number} (from 0)"


def _text_bits(value: str | bytes) -> int:
    data = value.encode() if isinstance(value, str) else value
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _splitmix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


_DEFAULTS = {"session": "session_id", "timestamp": "ts"}


@dataclass(frozen=True)
class Partition:
    """One partition of a table.

    Attributes:
        name: name of a Hive-style partition such as ``dt=2024-01-01/hour=03``; empty if the table
            has no partitions.
        files: Parquet files of the partition; empty if a dataset plugin reads the rows.
        num_rows: number of rows; None if unknown before reading.
    """

    name: str
    files: tuple[Path, ...]
    num_rows: int | None


class SessionTable(ABC):
    """A table with session and time columns, which can be read several times in stored order.

    Attributes:
        path: the file or folder that was opened.
        keys: names of the session and time columns.
        schema: all columns.
        features: names of the columns with lists of ids, in table order.
        partitions: partitions of the table, in order; at least one.
        batch_size: rows per training batch; None for Parquet tables.
    """

    path: Path
    keys: SessionKeys
    schema: pa.Schema
    features: tuple[str, ...]
    partitions: tuple[Partition, ...]
    batch_size: int | None = None

    @property
    def num_rows(self) -> int | None:
        """Return the number of rows of the table. None if unknown before reading."""
        counts = [partition.num_rows for partition in self.partitions]
        return None if None in counts else sum(count or 0 for count in counts)

    @abstractmethod
    def read(self, partition: Partition, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield the rows of a partition in batches.

        Args:
            partition: one of ``partitions``.
            columns: columns to read; None reads all columns.
        """


def open_source(
    path: Path,
    *,
    session: str | None = None,
    timestamp: str | None = None,
    plugins_dir: Path | None = None,
) -> SessionTable:
    """Open a Parquet table, or the training data of a registry file (YAML).

    Args:
        path: a Parquet file, a folder with ``*.parquet`` at any depth, or a registry file (.yaml or
            .yml).
        session, timestamp: session and time columns; None means ``session_id`` and ``ts`` in a
            Parquet table, and the columns of the dataset in a registry file.
        plugins_dir: folder of plugin files that a registry file needs.

    Raises:
        DataError: a column is missing, or the dataset of a registry file has no column roles.
    """
    given = {"session": session, "timestamp": timestamp}
    if path.suffix not in (".yaml", ".yml"):
        return ParquetSource(path, **{name: given[name] or _DEFAULTS[name] for name in given})
    from recd_plugins.api import load_registry

    registry = load_registry(path, plugins_dir=plugins_dir)
    roles = {"session": session, "time": timestamp}
    dataset = _with_roles(path, registry.dataset, {r: c for r, c in roles.items() if c is not None})
    return DatasetSource(path, dataset, registry.training.batch_size)


def _with_roles(path: Path, dataset: Dataset, roles: Mapping[str, str]) -> Dataset:
    """Return a dataset whose option ``columns`` gives roles to columns, keyed by role."""
    if not roles:
        return dataset
    options = dataset.options.model_dump(by_alias=True, exclude_none=True)
    columns = options.get("columns")
    if not isinstance(columns, dict):
        raise DataError(
            f"{path}: dataset {dataset.name!r} has no option 'columns' for --session and "
            "--timestamp. Set its session and time columns in dataset.options."
        )
    for role, chosen in roles.items():
        if chosen not in columns:
            hint = text_utils.did_you_mean(chosen, columns) or "."
            raise DataError(f"{path}: option 'columns' has no column {chosen!r}{hint}")
        for name, column in columns.items():
            others = [each for each in column["as"] if each not in (role, "unused")]
            column["as"] = [role] * (name == chosen) + others or ["unused"]
    try:
        return type(dataset)(type(dataset.options).model_validate(options))
    except ValidationError as error:
        problems = (each["msg"].removeprefix("Value error, ") for each in error.errors())
        raise DataError(f"{path}: {'; '.join(problems)}, or use another column.") from error


class ParquetSource(SessionTable):
    """A SessionTable that reads a Parquet file, or all Parquet files in a folder."""

    def __init__(self, path: Path, session: str, timestamp: str) -> None:
        self.path = path
        self.table = parquet.ParquetTable(path)
        self.schema = self.table.schema
        names = self.schema.names
        for option, column in (("--session", session), ("--timestamp", timestamp)):
            if column not in names:
                hint = text_utils.did_you_mean(column, names) or "."
                raise DataError(
                    f"{self.table.files[0]}: there is no column {column!r}{hint} Choose a column "
                    f"with {option}: {', '.join(map(repr, names))}."
                )
        self.keys = SessionKeys(session, timestamp)
        self.features = tuple(
            name for name in list_dict.id_features(self.schema) if name not in (session, timestamp)
        )
        files: dict[str, list[int]] = {}
        for number, file in enumerate(self.table.files):
            files.setdefault(_partition_name(file, path), []).append(number)
        self._files = files
        self.partitions = tuple(
            Partition(
                name,
                tuple(self.table.files[number] for number in numbers),
                sum(unit.num_rows for unit in self._units(name)),
            )
            for name in files
            if (numbers := files[name])
        )

    def read(self, partition: Partition, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        names = self.schema.names if columns is None else columns
        schema = pa.schema([self.schema.field(name) for name in names])
        pieces = (readers.Piece(unit, 0, unit.num_rows) for unit in self._units(partition.name))
        return self.table.read(pieces, schema)

    def _units(self, partition: str) -> Iterator[readers.Unit]:
        numbers = set(self._files[partition])
        return (unit for unit in self.table.units if unit.file in numbers)


class DatasetSource(SessionTable):
    """A SessionTable that reads the training split of a dataset plugin, as one partition."""

    def __init__(self, path: Path, dataset: Dataset, batch_size: int) -> None:
        self.path = path
        self.batch_size = batch_size
        self._dataset = dataset
        dataset.prepare()
        keys = dataset.session_keys()
        if keys is None:
            raise DataError(
                f"{path}: dataset {dataset.name!r} has no session column. Pass the column of users "
                "or visits with --session COLUMN, or give it the role session in the file."
            )
        self.features = dataset.schema().sparse
        first = next(iter(dataset.scan()), None)
        if first is None:
            raise DataError(f"{path}: the table has no rows. Use a table with rows.")
        self.keys = keys
        self.schema = first.data.schema
        self.partitions = (Partition("", (), None),)

    def read(
        self,
        partition: Partition,  # noqa: ARG002
        columns: Sequence[str] | None = None,
    ) -> Iterator[Rows]:
        for rows in self._dataset.scan():
            data = rows.data if columns is None else rows.data.select(list(columns))
            yield Rows(data, rows.origins)


def _partition_name(file: Path, root: Path) -> str:
    if file == root:
        return ""
    return "/".join(part for part in file.relative_to(root).parent.parts if "=" in part)


def check_target(source: Path, target: Path, force: bool) -> None:
    """Check that a command may write its output to ``target``.

    Raises:
        DataError: the paths are equal or one contains the other, or ``target`` may not be replaced.
    """
    new, old = file_utils.real_path(target), file_utils.real_path(source)
    if new == old or old in new.parents or new in old.parents:
        raise DataError(
            f"DST {target} must not be the same as SRC {source}, inside SRC, or a parent folder "
            "of SRC. Use another path for DST."
        )
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise DataError(
            f"{target} exists already. Use another path for DST, or replace the table with --force."
        )
    # What is replaced must be a table: a mistyped name costs no other data.
    for file in [target, *target.rglob("*")]:
        hidden = file.name.startswith(("_", "."))
        if file.is_file() and file.suffix != ".parquet" and not hidden:
            raise DataError(
                f"--force cannot replace {target}, because {file.name!r} is not a Parquet file. "
                f"Remove {target} yourself, or use another path for DST."
            )
