"""Base classes of dataset plugins, which read Arrow record batches on each rank."""

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
from recd_plugins.interfaces.tasks import Task
from recd_plugins.runtime.errors import DataError, RecdError

Split = Literal["train", "validation", "test"]
"""Name of a split of a dataset."""


@dataclass(frozen=True, eq=False)
class FeatureLookups:
    """Ids of one feature that a batch of rows looks up, with equal lists stored once.

    Attributes:
        ids: int64 ``[num_ids]``, after preprocessing; not checked against the table size.
        offsets: offsets of the lists in ``ids``, int64 ``[num_lists + 1]``.
        inverse: index of the list of each row, int64 ``[num_rows]``; None if row i has list i.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64] | NDArray[np.int32]
    inverse: NDArray[np.int64] | None


class Lookups(ABC):
    """Tables of the prepared model, and the ids that rows look up in the tables."""

    @property
    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """Return the tables of the model. Raises SetupError if no model is prepared."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[TableStrategy]:
        """Return the table strategies (kernels and costs) of ``sharding`` and ``cache`` entries.

        Raises:
            SetupError: no model is prepared.
        """

    @abstractmethod
    def of(self, rows: Rows, features: Sequence[str]) -> Mapping[str, FeatureLookups]:
        """Return the ids of ``rows``, keyed by feature. Raises DataError for invalid values."""


class Reader(ABC):
    """Iterates over one epoch of one rank's batches.

    Every batch has ``batch_size`` rows, and every rank gets the same number of batches. Training
    skips the last rows if there are too few for a batch on every rank. Evaluation reads the last
    rows with one rank and ``batch_size`` 1.

    A ``state_dict`` taken after batch i continues at batch i + 1 in a new reader, even if later
    batches were prefetched. With another number of ranks, the remaining rows are split over the
    new ranks.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch, which is the same on every rank."""

    @abstractmethod
    def __iter__(self) -> Iterator[Rows]:
        """Yield batches up to the end of the epoch, then move to the start of the next epoch."""

    def blocks(self, worker: int, num_workers: int) -> Iterator[Iterable[Rows]]:
        """Yield every ``num_workers``-th block of adjacent batches, from block ``worker`` on.

        The caller exhausts each block before requesting the next block. ``state_dict`` is the
        position after the last yielded batch, counting the batches of all workers.

        By default each batch is a block, and every worker reads all batches. Override this method
        to skip the batches of other workers without reading them, for example with one block per
        file or row group.
        """
        for number, rows in enumerate(self):
            if number % num_workers == worker:
                yield (rows,)

    def num_blocks(self) -> int | None:
        """Return the number of blocks; None if unknown. Override it if you override ``blocks``."""
        return None

    def skip(self, num_batches: int) -> int:
        """Skip batches without reading them, and return the number of skipped batches.

        Fewer than ``num_batches`` are skipped if the epoch ends. The position is then the start of
        the next epoch.
        """
        return sum(1 for _ in islice(self, num_batches))

    def num_left(self) -> int | None:
        """Return the number of remaining batches in the epoch; None if unknown."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position as a JSON object, which is equal on every rank."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a position that ``state_dict`` returned.

        Raises:
            DataError: the position was saved with other data or another batch size.
        """


#: Length of a stream, which may have no end.
ENDLESS = 1 << 40


class StreamReader(Reader):
    """Reads one rank's share of a stream, such as partitions of a Kafka topic.

    A stream has one epoch and no known number of batches. Before each batch, the data loader calls
    ``poll`` on all ranks and trains when every rank has a batch. Ranks may have different
    positions. ``merge_states`` combines them for a checkpoint.
    """

    def __len__(self) -> int:
        return ENDLESS

    @abstractmethod
    def poll(self, seconds: float) -> bool | None:
        """Wait up to ``seconds`` for the next batch.

        Returns:
            True if a batch is ready, so that the iterator yields it without waiting; False if
            there is none yet; None if the stream has ended.

        Raises:
            DataError: the stream cannot be read any further.
        """

    @abstractmethod
    def lag(self) -> int:
        """Return the number of this rank's known rows that were not yielded yet."""

    @abstractmethod
    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Combine the results of ``state_dict`` of all ranks, in the order of ranks."""

    @abstractmethod
    def close(self) -> None:
        """Close connections and threads."""


class Dataset(Plugin, ABC):
    """Source of training rows, such as a Parquet table.

    Attributes:
        is_stream: whether ``reader`` returns a StreamReader.
        row_options: names of options, with dots if nested, that select, order or repair rows. These
            options may change before scoring with a checkpoint, but not before resuming a run.
        trained_schema: ``schema`` from the checkpoint, set before ``to_score`` if the training data
            is missing.
        trained_kinds: ``kinds`` from the checkpoint, set together with ``trained_schema``; empty
            for old checkpoints.
    """

    kind: ClassVar[str] = "dataset"
    is_stream: ClassVar[bool] = False
    row_options: frozenset[str] = frozenset()
    trained_schema: FeatureSchema | None = None
    trained_kinds: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the methods of a subclass so that their errors name the plugin."""
        super().__init_subclass__(**options)
        guard_overrides(cls)

    @abstractmethod
    def prepare(self) -> None:
        """Check the location and create missing files. Called once, before any rank reads.

        Raises:
            DataError: the location is missing or does not match the options.
        """

    @abstractmethod
    def schema(self) -> FeatureSchema:
        """Return the names and roles of the columns that ``reader`` yields."""

    def known_schema(self) -> FeatureSchema | None:
        """Return the schema, or None if it is unknown until ``prepare`` has run."""
        return self.schema()

    def known_tasks(self) -> tuple[Task, ...]:
        """Return the tasks of ``known_schema``; () if the schema is unknown without the data."""
        try:
            schema = self.known_schema()
        except RecdError:
            return ()
        return () if schema is None else schema.tasks

    def left_out(self) -> Mapping[str, str]:
        """Return a dict from each unused column of the data to the reason why it is unused.

        Raises:
            DataError: the data is missing or wrong.
        """
        return {}

    def mistakes(self) -> Sequence[tuple[tuple[str, ...], str]]:
        """Return errors of options that contradict the columns of the data. Reads no rows.

        Each error is a pair of a path of keys, such as ``("columns", "devise")``, and a message. Do
        not report missing data here, but in ``prepare``.
        """
        return ()

    def identity(self) -> dict[str, Any]:
        """Return JSON values that identify the rows, such as names, sizes and digests of files.

        The values must not depend on the location of the files. Resuming a run requires the same
        identity on each rank.

        Raises:
            DataError: the data is missing or wrong.
        """
        return {}

    def splits(self) -> tuple[Split, ...]:
        """Return the names of the splits that ``reader`` can read, such as ``train``."""
        return ("train",)

    @abstractmethod
    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        """Return a reader of this rank's share of a split.

        Raises:
            DataError: the split does not exist or has too few rows for one batch on every rank.
        """

    def sample(self, batch_size: int) -> Iterable[Rows]:
        """Return batches of training rows, with which converters and preprocessing are fitted.

        The batches are equal on all ranks. By default they are all training batches. A stream
        overrides this method, and yields the batches that exist now, at least one.
        """
        return self.reader(rank=0, world_size=1, batch_size=batch_size, split="train")

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        """Return a reader like ``reader`` whose rows also contain ``session_keys().groups``.

        Raises:
            DataError: the dataset has no sessions, or ``reader`` raises DataError.
        """
        raise DataError(
            f"dataset {self.name!r} has no session column in the {split} split. Use a dataset with "
            "sessions, or remove the plugins that need sessions"
        )

    def label_mean(self) -> float | None:
        """Return the mean label of the training split, for the initial bias of the model.

        Return None if the data does not contain the mean label.
        """
        return None

    def task_means(self) -> Mapping[str, float]:
        """Return the best constant prediction of each task, for the initial biases of the model.

        It is the mean target of the training split; for a weighted task, the sum of the positive
        weights divided by this sum plus the number of negatives. Unknown means are missing.
        """
        return {}

    def session_keys(self) -> SessionKeys | None:
        """Return the session, time and request columns of ``scan``; None without ``scan``."""
        return None

    def scan(self, split: Split = "train") -> Iterator[Rows]:
        """Yield every row of a split once, in stored order, in batches of any size.

        Rows have the columns of ``schema`` and ``session_keys``.

        Raises:
            DataError: the split does not exist, or the dataset has no sessions.
        """
        raise DataError(
            f"dataset {self.name!r} has no sessions, so its {split} split cannot be scanned in "
            "session order. Use a dataset with sessions, or a Parquet file or folder"
        )

    def keys(self) -> Mapping[str, str]:
        """Return the columns to copy to prediction files, as a dict from column to output name."""
        keys = self.session_keys()
        names = () if keys is None else (keys.session, keys.timestamp)
        return {name: name for name in names}

    def texts(self, feature: str) -> Mapping[int, str]:
        """Return a dict from each id of a text feature to its text."""
        return {}

    def kinds(self) -> Mapping[str, str]:
        """Return a dict from column name to a short description of its values, such as the type.

        Checkpoints store the descriptions. Scoring rejects data with other descriptions, because
        ids would have another meaning.
        """
        return {}

    def storage(self) -> Storage | None:
        """Return the object store options of the dataset; None if it has no such options."""
        option = getattr(self.options, "storage", None)
        return option if isinstance(option, Storage) else None

    def to_score(self, location: str) -> Dataset:
        """Return a dataset that reads another table with the same columns and options, for scoring.

        ``scan("train")`` of the result yields every row in stored order, without row filters, with
        the columns of ``schema`` and ``keys``. A missing label is 0. If the training data is
        missing, ``trained_schema`` defines the columns.

        Args:
            location: path or URL of the table.

        Raises:
            DataError: the dataset cannot score other tables, or a column is missing.
        """
        raise DataError(f"dataset {self.name!r} cannot score other tables. Use recd evaluate")


class DatasetWrapper(Dataset):
    """Wrapper that reorders the rows of a dataset, configured in ``dataset.wrap``.

    A wrapper overrides ``reader``. Training reads from the wrapper, but evaluation, profiles and
    ``recd analyze`` read from the inner dataset. The wrapper must yield each row exactly once with
    all columns, unless ``rows_together`` is above 1.

    Attributes:
        uneven_batches: whether batches may have more or fewer rows than ``batch_size``. Training
            then weights the loss of each rank by its number of rows.
        inner: the wrapped dataset.
        lookups: tables of the prepared model, and the ids that rows look up.
    """

    uneven_batches: ClassVar[bool] = False
    inner: Dataset
    lookups: Lookups

    @property
    def rows_together(self) -> int:
        """Number of training rows per row of ``inner``. Batch sizes must be multiples of this."""
        return 1

    def over(self, inner: Dataset, lookups: Lookups) -> Self:
        """Return a copy of this wrapper around ``inner``."""
        wrapped = type(self)(self.options).placed(self.stands_at)
        wrapped.inner = inner
        wrapped.lookups = lookups
        return wrapped

    def check(self) -> None:
        """Check the setup before training starts. ``lookups`` is already set.

        Raises:
            RecdError: the wrapper cannot run. The caller adds file and line number to the message.
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

    def task_means(self) -> Mapping[str, float]:
        return self.inner.task_means() if self.rows_together == 1 else {}

    # All other methods delegate to the inner dataset.

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


class WithSessions(DatasetWrapper):
    """Dataset wrapper that adds session and request columns to the rows of ``reader``."""

    name = "dataset.with_sessions"

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        return self.inner.session_reader(
            rank=rank, world_size=world_size, batch_size=batch_size, split=split
        )

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        return self.reader(rank=rank, world_size=world_size, batch_size=batch_size, split=split)
