"""Plugin kind ``dataset``: resumable readers of Arrow record batches, split over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from recd_plugins.interfaces.plugin import Plugin, PluginOptions, guard_overrides
from recd_plugins.interfaces.rows import FeatureSchema, Rows, SessionKeys, Storage, Table
from recd_plugins.interfaces.tables import TableStrategy
from recd_plugins.runtime.errors import DataError

Split = Literal["train", "test"]
"""The splits of a dataset."""


@dataclass(frozen=True, eq=False)
class FeatureLookups:
    """Ids that rows look up by one feature, with equal lists stored once.

    Attributes:
        ids: int64 ``[num_ids]``, after preprocessing, without a check of bounds.
        offsets: bounds of the lists in ``ids``, ``[num_lists + 1]``.
        inverse: list of each row, int64 ``[num_rows]``; None if row i has list i.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64] | NDArray[np.int32]
    inverse: NDArray[np.int64] | None


class Lookups(ABC):
    """Tables of the prepared model, and the ids that rows look up in them."""

    @property
    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """Tables of the model; SetupError if no model is prepared."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[TableStrategy]:
        """Strategies of sharding and cache entries; SetupError if no model is prepared."""

    @abstractmethod
    def of(self, rows: Rows, features: Sequence[str]) -> Mapping[str, FeatureLookups]:
        """Return the lookups of ``rows`` by feature; DataError for a wrong feature."""


class Reader(ABC):
    """Iterates over one epoch of one rank's batches.

    Every batch has ``batch_size`` rows, and every rank gets the same number of batches. The last
    rows, which do not fill a batch on every rank, are left out; evaluation reads them with one rank
    and ``batch_size`` 1.

    A ``state_dict`` taken after batch i continues at batch i + 1 in a new reader, whatever was
    prefetched. Another number of ranks splits the remaining rows again.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the batches of a whole epoch, the same on every rank."""

    @abstractmethod
    def __iter__(self) -> Iterator[Rows]:
        """Yield batches up to the end of the epoch, then return to its start."""

    def blocks(self, worker: int, num_workers: int) -> Iterator[Iterable[Rows]]:
        """Yield every ``num_workers``-th block of adjacent batches, from block ``worker`` on.

        Each block is iterated before the next. ``state_dict`` is the position after the last
        yielded batch, with the batches of other workers before it.

        By default each batch is a block, and all are read. Override it to skip other workers'
        batches unread; begin a block with each file or row group.
        """
        for number, rows in enumerate(self):
            if number % num_workers == worker:
                yield (rows,)

    def num_blocks(self) -> int | None:
        """Return the number of blocks, None if unknown; override it together with ``blocks``."""
        return None

    def skip(self, num_batches: int) -> int:
        """Skip batches as if they had been read; return their number.

        At the end of the epoch it is smaller, and the position returns to the start.
        """
        return sum(1 for _ in islice(self, num_batches))

    def num_left(self) -> int | None:
        """Return the number of batches to the end of the epoch, None if unknown."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, equal on every rank."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a position; DataError if it belongs to other data or another batch size."""


class Dataset(Plugin, ABC):
    """Table of training rows.

    Attributes:
        row_options: options that select and order rows without changing them. Scoring a checkpoint
            may change them, resuming a run may not.
        trained_schema: ``schema`` of missing training data, set before ``to_score``.
        trained_kinds: ``kinds`` of missing training data; empty for old checkpoints.
    """

    kind: ClassVar[str] = "dataset"
    row_options: ClassVar[frozenset[str]] = frozenset()
    trained_schema: FeatureSchema | None = None
    trained_kinds: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        """Make errors of each method name the plugin, even if a wrapper calls it."""
        super().__init_subclass__(**options)
        guard_overrides(cls)

    @abstractmethod
    def prepare(self) -> None:
        """Check the location and create missing files, once and before any rank reads.

        Raises:
            DataError: the location is missing or does not match the options.
        """

    @abstractmethod
    def schema(self) -> FeatureSchema:
        """Return the columns of ``reader``."""

    def left_out(self) -> Mapping[str, str]:
        """Return unused columns of the data, each with a short reason.

        Raises:
            DataError: the data is missing or wrong.
        """
        return {}

    def mistakes(self) -> Sequence[tuple[tuple[str, ...], str]]:
        """Return wrong options, as seen from the columns of the data without reading rows.

        Each item is a path of keys, such as ``("columns", "devise")``, and a message. Ignore
        missing data, which ``prepare`` reports.
        """
        return ()

    def identity(self) -> dict[str, Any]:
        """Return JSON values that identify the rows, such as names, sizes and digests of files.

        They must not depend on the location. Resuming requires the same identity on each rank.

        Raises:
            DataError: the data is missing or wrong.
        """
        return {}

    def splits(self) -> tuple[Split, ...]:
        """Return the splits that ``reader`` can read."""
        return ("train",)

    @abstractmethod
    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        """Return a reader of this rank's share of a split.

        Raises:
            DataError: there is no such split, or it has too few rows for a batch on every rank.
        """

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        """Return a ``reader`` with the same states that also yields the session column.

        Raises:
            DataError: as ``reader``, or the dataset has no sessions.
        """
        raise DataError(
            f"{self.name} has no sessions for the rows of the {split} split; use a dataset with "
            "sessions, or leave them out"
        )

    def label_mean(self) -> float | None:
        """Return the stored mean label of the training split, for the initial bias of the model."""
        return None

    def session_keys(self) -> SessionKeys | None:
        """Return the session and time columns of ``scan``; None for a dataset without ``scan``."""
        return None

    def scan(self, split: Split = "train") -> Iterator[Rows]:
        """Yield every row of a split once, in stored order and batches of any size.

        Yields the columns of ``schema`` and of ``session_keys``.

        Raises:
            DataError: there is no such split, or the dataset has no sessions.
        """
        raise DataError(
            f"{self.name} has no sessions, so its {split} split cannot be scanned; use a dataset "
            "with sessions, or a Parquet file or folder"
        )

    def keys(self) -> Mapping[str, str]:
        """Return the key columns of predictions, with their names in the output."""
        keys = self.session_keys()
        names = () if keys is None else (keys.session, keys.timestamp)
        return {name: name for name in names}

    def texts(self, feature: str) -> Mapping[int, str]:
        """Return the text of each id of a text feature."""
        return {}

    def kinds(self) -> Mapping[str, str]:
        """Return a word for the values of each column, such as the type.

        Checkpoints store it, as ids of values of another kind would not match.
        """
        return {}

    def storage(self) -> Storage | None:
        """Return the option ``storage`` if there is one."""
        option = getattr(self.options, "storage", None)
        return option if isinstance(option, Storage) else None

    def to_score(self, location: str) -> Dataset:
        """Return a dataset with the same columns and options over another table, for scoring.

        Its ``scan("train")`` yields every row in stored order, without row filters, with the
        columns of ``schema`` and ``keys``. A missing label is 0. If the training data is gone, the
        columns are those of ``trained_schema``.

        Args:
            location: path or URL of the table.

        Raises:
            DataError: the dataset cannot score other tables, or a column is missing.
        """
        raise DataError(f"{self.name} cannot score other tables")


class DatasetWrapper(Dataset):
    """Reorders the rows of another dataset in ``dataset.wrap``.

    A wrapper overrides ``reader``, which training and the planner's sample use; evaluation,
    profiles and ``recd analyze`` read the inner dataset. It keeps each row once with all columns,
    unless ``rows_together`` is above 1.

    Attributes:
        inner: the wrapped dataset.
        lookups: tables and lookups of the prepared model.
    """

    inner: Dataset
    lookups: Lookups

    @property
    def rows_together(self) -> int:
        """Training rows that replace one row of ``inner``; batch sizes are multiples of it."""
        return 1

    def over(self, inner: Dataset, lookups: Lookups) -> Self:
        """Return a wrapper with the same options around ``inner``."""
        wrapped = type(self)(self.options).placed(self.stands_at)
        wrapped.inner = inner
        wrapped.lookups = lookups
        return wrapped

    def check(self) -> None:
        """Check the setup before training reads; ``lookups`` is set.

        Raises:
            RecdError: the wrapper cannot run; the caller adds the line of its entry.
        """

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        inner = WithSessions(PluginOptions()).over(self.inner, self.lookups)
        return self.over(inner, self.lookups).reader(
            rank=rank, world_size=world_size, batch_size=batch_size, split=split
        )

    def label_mean(self) -> float | None:
        return self.inner.label_mean() if self.rows_together == 1 else None

    # Everything else is the inner dataset's.

    def prepare(self) -> None:
        self.inner.prepare()

    def identity(self) -> dict[str, Any]:
        return self.inner.identity()

    def schema(self) -> FeatureSchema:
        return self.inner.schema()

    def left_out(self) -> Mapping[str, str]:
        return self.inner.left_out()

    def splits(self) -> tuple[Split, ...]:
        return self.inner.splits()

    def session_keys(self) -> SessionKeys | None:
        return self.inner.session_keys()

    def scan(self, split: Split = "train") -> Iterator[Rows]:
        return self.inner.scan(split)

    def keys(self) -> Mapping[str, str]:
        return self.inner.keys()

    def texts(self, feature: str) -> Mapping[int, str]:
        return self.inner.texts(feature)

    def storage(self) -> Storage | None:
        return self.inner.storage()

    def to_score(self, location: str) -> Dataset:
        return self.inner.to_score(location)


class WithSessions(DatasetWrapper):
    """A dataset whose ``reader`` is its ``session_reader``."""

    name = "dataset.with_sessions"

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        return self.inner.session_reader(
            rank=rank, world_size=world_size, batch_size=batch_size, split=split
        )

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        return self.reader(rank=rank, world_size=world_size, batch_size=batch_size, split=split)
