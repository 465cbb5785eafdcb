"""Where ``recd analyze`` and ``recd cluster`` take rows from: Parquet, or a dataset plugin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from recd_plugins.api import (
    DataError,
    Dataset,
    ParquetTable,
    Piece,
    Rows,
    SessionKeys,
    Unit,
    did_you_mean,
    id_features,
    real_path,
)

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
    """Open what PATH of a command names.

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
        self.table = ParquetTable(path)
        self.schema = self.table.schema
        names = self.schema.names
        for option, column in (("--session", session), ("--timestamp", timestamp)):
            if column not in names:
                raise DataError(
                    f"{self.table.files[0]}: no column {column}{did_you_mean(column, names)}; name "
                    f"it with {option}; the columns are {', '.join(names)}"
                )
        self.keys = SessionKeys(session, timestamp)
        self.features = tuple(
            name for name in id_features(self.schema) if name not in (session, timestamp)
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
        pieces = (Piece(unit, 0, unit.num_rows) for unit in self._units(partition.name))
        return self.table.read(pieces, schema)

    def _units(self, partition: str) -> Iterator[Unit]:
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
    new, old = real_path(target), real_path(source)
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
