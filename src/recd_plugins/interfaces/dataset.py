"""Kind ``dataset``: reads Arrow record batches, resumable and split over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from recd_plugins.interfaces.data_profile import TableStatistics
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
        ids: int64 ``[num_ids]``, after preprocessing; not checked against their table.
        offsets: ``[num_lists + 1]``, from 0: start and end of each list in ``ids``.
        inverse: int64 ``[num_rows]``, the list of each row; None if row i has list i.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64] | NDArray[np.int32]
    inverse: NDArray[np.int64] | None


class Lookups(ABC):
    """The tables of the prepared model, and the ids that rows look up in them."""

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
        """Return the lookups of ``rows`` by feature, after preprocessing.

        Raises:
            DataError: a feature is missing or damaged.
        """


class Reader(ABC):
    """Iterates over one epoch of one rank's batches.

    Every batch has ``batch_size`` rows, and every rank gets the same number of batches. Rows that
    do not fill a batch on every rank are left out: the last ones in the order of a single rank with
    ``batch_size`` 1, which is how evaluation reads them.

    A ``state_dict`` taken after batch i continues at batch i + 1 in a new reader, whatever was
    prefetched. With another number of ranks the remaining rows are dealt anew.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the batches of a whole epoch, the same on every rank."""

    @abstractmethod
    def __iter__(self) -> Iterator[Rows]:
        """Yield batches from the position to the end of the epoch, then return to its start."""

    def blocks(self, worker: int, num_workers: int) -> Iterator[Iterable[Rows]]:
        """Yield the blocks of one of ``num_workers`` processes that share this rank's batches.

        Blocks are runs of adjacent batches from the position to the end of the epoch. A worker gets
        blocks ``worker``, ``worker + num_workers``, and so on, and iterates each before the next.
        ``state_dict`` counts batches of other workers too: it is the position after the last batch
        handed out.

        Override this to skip batches unread; start a block where a batch begins in another file or
        row group. By default each batch is a block, and all are read.
        """
        for number, rows in enumerate(self):
            if number % num_workers == worker:
                yield (rows,)

    def num_blocks(self) -> int | None:
        """Return the number of blocks of all workers, None if unknown. Override with ``blocks``."""
        return None

    def skip(self, num_batches: int) -> int:
        """Skip batches as if they had been read; return how many there were.

        At the end of the epoch there are fewer, and the position returns to the start.
        """
        return sum(1 for _ in islice(self, num_batches))

    def num_left(self) -> int | None:
        """Return the batches from the position to the end of the epoch, None if unknown."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch: JSON values, equal on every rank."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a position.

        Raises:
            DataError: it belongs to other data or another batch size.
        """


class Dataset(Plugin, ABC):
    """A table of training rows.

    Example:
        class Squares(Dataset):
            "Numbers and whether they are even."

            name = "acme.squares"

    Attributes:
        row_options: options that select and order rows without changing them. Scoring a checkpoint
            may change them, resuming a run may not.
        trained_schema: ``schema`` of the training data, set before ``to_score`` if that data is
            gone.
        trained_kinds: ``kinds`` of it; empty for checkpoints of older versions.
    """

    kind: ClassVar[str] = "dataset"
    row_options: ClassVar[frozenset[str]] = frozenset()
    trained_schema: FeatureSchema | None = None
    trained_kinds: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        """Let errors of each method name the plugin that defines it, also when a wrapper calls."""
        super().__init_subclass__(**options)
        guard_overrides(cls)

    @abstractmethod
    def prepare(self) -> None:
        """Check the location and make missing files (a generated table, a cache).

        Called once, in one process, before any rank reads.

        Raises:
            DataError: the location is missing or does not match the options.
        """

    @abstractmethod
    def schema(self) -> FeatureSchema:
        """Return the columns that ``reader`` yields."""

    def left_out(self) -> Mapping[str, str]:
        """Return stored columns that nothing reads, each with a short reason.

        Raises:
            DataError: the data is missing or wrong.
        """
        return {}

    def mistakes(self) -> Sequence[tuple[tuple[str, ...], str]]:
        """Return options that do not suit the columns of the data, without reading rows.

        Each is a path of keys, such as ``("columns", "devise")``, and what is wrong. ``recd
        validate`` shows them with lines of the file. Missing data is left to ``prepare``.
        """
        return ()

    def identity(self) -> dict[str, Any]:
        """Return JSON values that identify the rows wherever the files lie.

        For example names and sizes of files with a quick digest. Empty if the options say it all,
        ``free_options`` aside. Resuming requires the same identity, which each rank checks.

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
        """Return a ``reader`` that also yields the session column; its states are the same.

        Wrappers that keep sessions together read by it.

        Raises:
            DataError: as ``reader``; or the dataset has no sessions.
        """
        raise DataError(
            f"{self.name} does not say which rows of the {split} split belong to one session; "
            "leave sessions out, or take a dataset that does"
        )

    def statistics(self) -> TableStatistics | None:
        """Return duplication statistics of the training split, if known without reading it.

        The planner takes lengths and savings of deduplication from it, or from the first rows.

        Raises:
            DataError: the stored statistics are damaged.
        """
        return None

    def label_mean(self) -> float | None:
        """Return the mean label of the training split, if known without reading it.

        Its logit is the initial bias of the built-in model's last layer.
        """
        return None

    def session_keys(self) -> SessionKeys | None:
        """Return the session and time columns of ``scan``; None if the dataset cannot scan."""
        return None

    def scan(self, split: Split = "train") -> Iterator[Rows]:
        """Yield every row of a split once, in stored order, in batches of any size.

        Yields the columns of ``schema`` and of ``session_keys``. ``recd analyze`` and ``recd
        cluster`` use it.

        Raises:
            DataError: there is no such split, or the dataset has no sessions.
        """
        raise DataError(
            f"{self.name} does not say which rows belong to one session, so the {split} split "
            "cannot be scanned; take a dataset that does, or a Parquet file or folder"
        )

    def keys(self) -> Mapping[str, str]:
        """Return the columns of ``scan`` that predictions carry, with their names in the output."""
        keys = self.session_keys()
        names = () if keys is None else (keys.session, keys.timestamp)
        return {name: name for name in names}

    def texts(self, feature: str) -> Mapping[int, str]:
        """Return the text of each id of a sparse feature that is text in the data."""
        return {}

    def kinds(self) -> Mapping[str, str]:
        """Return a word for the values of columns, such as their type.

        Checkpoints keep it: ``to_score`` refuses values of another kind, whose ids would not match.
        """
        return {}

    def storage(self) -> Storage | None:
        """Return how to reach the store of a URL: the option ``storage``, if there is one."""
        option = getattr(self.options, "storage", None)
        return option if isinstance(option, Storage) else None

    def to_score(self, location: str) -> Dataset:
        """Return a dataset with the same columns and options over another table, to score it.

        Its ``scan("train")`` yields every row in stored order, whatever row filters say, with the
        columns of ``schema`` and ``keys``. A missing label is 0. If this dataset's own data is
        gone, the columns are those of ``trained_schema``.

        Args:
            location: a path or URL, as in the option of the training split.

        Raises:
            DataError: this dataset cannot do that; or a column is missing.
        """
        raise DataError(f"{self.name} cannot score other tables")


class DatasetWrapper(Dataset):
    """Reorders the rows of another dataset; stands under ``dataset.wrap``.

    A wrapper overrides ``reader``. Training and the planner's sample use it; evaluation, profiles
    and ``recd analyze`` read the inner dataset. It keeps each row once, with all columns, unless
    ``rows_together`` says that it adds rows.

    Attributes:
        inner: the wrapped dataset, maybe a wrapper itself.
        lookups: the rows of tables that samples look up, once a model is prepared.
    """

    inner: Dataset
    lookups: Lookups

    @property
    def rows_together(self) -> int:
        """Training rows that replace one row of ``inner``, all in one batch.

        Above 1 for a wrapper that adds rows; batch sizes are then multiples of it.
        """
        return 1

    def over(self, inner: Dataset, lookups: Lookups) -> Self:
        """Return a wrapper with the same options around ``inner``."""
        wrapped = type(self)(self.options).placed(self.stands_at)
        wrapped.inner = inner
        wrapped.lookups = lookups
        return wrapped

    def check(self) -> None:
        """Refuse an impossible setup before training reads; ``lookups`` knows the model.

        Raises:
            RecdError: the reason; the line of the wrapper's entry is added.
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

    def statistics(self) -> TableStatistics | None:
        return self.inner.statistics()

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
