"""Tables of sessions: where their rows come from, hashes and shards of sessions, and checks."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

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
    """Return session ids as an Arrow array of integers, strings or bytes."""
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
                f"numeric session ids must be whole and fit into int64: {error}"
            ) from error
    if not (pt.is_integer(kind) or is_text(kind)):
        raise DataError(f"session ids are of type {kind}; expected whole numbers or strings")
    return sessions


def is_text(kind: pa.DataType) -> bool:
    """Return whether values are strings or bytes."""
    checks = (pt.is_string, pt.is_large_string, pt.is_binary, pt.is_large_binary)
    return any(check(kind) for check in checks)


def session_hashes(sessions: Any, seed: int = 0) -> NDArray[np.uint64]:
    """Return a hash of each session id, uint64 ``[rows]``: the same on every machine, for ever.

    The hash is splitmix64 of the id's 64 bits, for text of the first 8 bytes of its BLAKE2b.
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
    """Return the hash mod number of shards of each session id, int64 ``[rows]``."""
    return (session_hashes(sessions) % np.uint64(num_shards)).astype(np.int64)


def check_keys(rows: Rows, keys: SessionKeys) -> None:
    """Refuse null sessions, null or NaN times, and numeric sessions that are not whole."""
    check_no_nulls(rows, keys.session)
    check_no_nulls(rows, keys.timestamp)
    times = rows.data.column(keys.timestamp)
    if pt.is_floating(times.type) and np.isnan(times.to_numpy()).any():
        row = int(np.isnan(times.to_numpy()).argmax())
        raise DataError(f"{row_place(rows, row)}, column {keys.timestamp!r}: NaN is no time")
    try:
        plain_sessions(rows.data.column(keys.session))
    except DataError as error:
        where = f"{row_place(rows, 0)} and after, column {keys.session!r}"
        raise DataError(f"{where}: {error}") from error


def check_no_nulls(rows: Rows, name: str) -> None:
    """Refuse a null in a column of sessions or times."""
    row = rows.data.column(name).is_null().index(True).as_py()
    if row >= 0:
        raise DataError(
            f"{row_place(rows, row)}, column {name!r}: null; every row needs a session and a time"
        )


def without_nulls(rows: Rows, features: Sequence[str], nulls: Nulls) -> Rows:
    """Return rows with empty lists for nulls; a feature that had some becomes plain lists."""
    data = rows.data
    for name in features:
        column, field = data[name], data.schema.field(name)
        stored = list_dict.is_list_dict(field)
        if not stored and not (pt.is_list(field.type) or pt.is_large_list(field.type)):
            continue
        if column.null_count and nulls == "error":
            raise DataError(
                f"{arrow.place(rows, name, column.is_null().index(True).as_py())}: "
                "the list is null; "
                "write an empty one, or let --nulls empty make it one"
            )
        if not stored and column.flatten().null_count:
            row = next(
                row for row, each in enumerate(column) if each.values and each.values.null_count
            )
            raise DataError(
                f"{arrow.place(rows, name, row)}: a null in the list; write lists without nulls"
            )
        if column.null_count:
            lists = list_dict.to_lists(column) if stored else column
            filled = lists.fill_null(pa.scalar([], lists.type))
            data = data.set_column(data.schema.get_field_index(name), name, filled)
    return replace(rows, data=data)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema with features as lists."""
    lists = pa.list_(pa.int64())
    return pa.schema(
        [pa.field(each.name, lists) if list_dict.is_list_dict(each) else each for each in schema]
    )


def plain_rows(rows: Rows, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows with the columns of ``plain_schema``."""
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
    """Return the file of a row and its number there."""
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
    """Files of a Hive-style partition such as ``dt=2024-01-01/hour=03``, or all rows of a dataset.

    ``num_rows`` is None if it is not known before reading.
    """

    name: str
    files: tuple[Path, ...]
    num_rows: int | None


class SessionTable(ABC):
    """Rows of sessions in stored order, which can be read any number of times.

    Attributes:
        path: the file or folder that it was opened from.
        keys: columns of session and time.
        schema: all columns.
        features: names of the columns of ids, in order.
        partitions: in order, at least one.
        batch_size: rows of a training batch, None if the source does not say.
    """

    path: Path
    keys: SessionKeys
    schema: pa.Schema
    features: tuple[str, ...]
    partitions: tuple[Partition, ...]
    batch_size: int | None = None

    @property
    def num_rows(self) -> int | None:
        """Rows of all partitions, None if that is not known before reading."""
        counts = [partition.num_rows for partition in self.partitions]
        return None if None in counts else sum(count or 0 for count in counts)

    @abstractmethod
    def read(self, partition: Partition, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield every row of a partition once, with ``columns`` or all, in batches of any size."""


def open_source(
    path: Path,
    *,
    session: str | None = None,
    timestamp: str | None = None,
    plugins_dir: Path | None = None,
) -> SessionTable:
    """Open the table at PATH.

    Args:
        path: a Parquet file, a folder with ``*.parquet`` at any depth, or a registry file (.yaml or
            .yml), whose dataset is read, its split ``train``.
        session, timestamp: columns of a Parquet table, ``session_id`` and ``ts`` unless they are
            given. A dataset knows its own.
        plugins_dir: a folder of plugin files that a registry file may need.
    """
    given = {"session": session, "timestamp": timestamp}
    if path.suffix not in (".yaml", ".yml"):
        return ParquetSource(path, **{name: given[name] or _DEFAULTS[name] for name in given})
    if named := [f"--{name}" for name, column in given.items() if column is not None]:
        raise DataError(
            f"{path}: the dataset of a registry file knows its columns; leave out "
            f"{' and '.join(named)}, and set the options of the dataset"
        )
    from recd_plugins.api import load_registry

    registry = load_registry(path, plugins_dir=plugins_dir)
    return DatasetSource(path, registry.dataset, registry.training.batch_size)


class ParquetSource(SessionTable):
    """A Parquet file, or the files below a folder; a Hive-style partition is a partition."""

    def __init__(self, path: Path, session: str, timestamp: str) -> None:
        self.path = path
        self.table = parquet.ParquetTable(path)
        self.schema = self.table.schema
        names = self.schema.names
        for option, column in (("--session", session), ("--timestamp", timestamp)):
            if column not in names:
                raise DataError(
                    f"{self.table.files[0]}: no column "
                    f"{column}{text_utils.did_you_mean(column, names)}; name "
                    f"it with {option}; the columns are {', '.join(names)}"
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
    """The training split of a dataset plugin, as one partition."""

    def __init__(self, path: Path, dataset: Dataset, batch_size: int) -> None:
        self.path = path
        self.batch_size = batch_size
        self._dataset = dataset
        dataset.prepare()
        self.features = dataset.schema().sparse
        keys = dataset.session_keys()
        first = next(iter(dataset.scan()), None)
        if first is None or keys is None:
            raise DataError(f"{path}: {dataset.name} has no rows of sessions to read")
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
    """Refuse a target inside of the source or around it, and one that is not to be replaced."""
    new, old = file_utils.real_path(target), file_utils.real_path(source)
    if new == old or old in new.parents or new in old.parents:
        raise DataError(f"{target} and {source} lie in each other; name another")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise DataError(f"{target} exists already; name another, or replace it by --force")
    # What is replaced must be a table: a mistyped name costs no other data.
    for file in [target, *target.rglob("*")]:
        hidden = file.name.startswith(("_", "."))
        if file.is_file() and file.suffix != ".parquet" and not hidden:
            raise DataError(f"{target} is no table, it holds {file.name}; remove it yourself")
