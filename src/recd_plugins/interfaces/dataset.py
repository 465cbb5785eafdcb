"""Kind ``dataset``: a location becomes Arrow record batches, resumable, split over ranks."""

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
from recd_plugins.interfaces.plugin import Plugin, PluginOptions, guard_methods
from recd_plugins.interfaces.rows import FeatureSchema, Rows, SessionKeys, Storage, Table
from recd_plugins.interfaces.tables import TableStrategy
from recd_plugins.runtime.errors import DataError


@dataclass(frozen=True, eq=False)
class FeatureLookups:
    """The ids that rows of data look up by one feature, lists that are the same stored once.

    Attributes:
        ids: int64 ``[num_ids]``, after preprocessing; not checked against their table.
        offsets: ``[num_lists + 1]``: where in ``ids`` each list starts and ends; the first is 0.
        inverse: int64 ``[num_rows]``: the list of each row; None where list i is that of row i.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64] | NDArray[np.int32]
    inverse: NDArray[np.int64] | None


class Lookups(ABC):
    """What a registry knows of the model that it has prepared, and of what samples look up."""

    @property
    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """The model's tables.

        Raises:
            SetupError: no model is prepared.
        """

    @property
    @abstractmethod
    def parts(self) -> Sequence[TableStrategy]:
        """What sharding and cache entries do to the tables.

        Raises:
            SetupError: no model is prepared.
        """

    @abstractmethod
    def of(self, rows: Rows, features: Sequence[str]) -> Mapping[str, FeatureLookups]:
        """What ``rows`` look up by each of ``features``, after preprocessing.

        Raises:
            DataError: a feature is missing or damaged.
            PluginError: a step of preprocessing failed.
        """


Split = Literal["train", "test"]
"""The splits of a dataset."""

#: Methods of datasets and wrappers that many call, wrappers among them.
_GUARDED = (
    "prepare",
    "schema",
    "left_out",
    "mistakes",
    "identity",
    "splits",
    "reader",
    "session_reader",
    "statistics",
    "session_keys",
    "scan",
    "keys",
    "texts",
    "label_mean",
    "kinds",
    "storage",
    "to_score",
    "check",
    "expected_groups",
)


class Reader(ABC):
    """Iterates over one epoch's batches of one rank.

    Every batch has exactly ``batch_size`` rows and every rank gets the same number of batches;
    rows that do not fill a batch on every rank are left out: the last ones of the order in which
    one rank with a ``batch_size`` of 1 reads them, which is how evaluation reads them.
    ``state_dict`` taken after batch i was handed out and loaded into a new reader makes it go on at
    batch i + 1, whatever was prefetched. A state taken at another number of ranks loads too: what
    is left is dealt anew.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""

    @abstractmethod
    def __iter__(self) -> Iterator[Rows]:
        """Batches from the current position to the end of the epoch.

        At the end the position returns to the start: iterate again for the next epoch.
        """

    def blocks(self, worker: int, num_workers: int) -> Iterator[Iterable[Rows]]:
        """What one of ``num_workers`` processes reads that share the batches of this rank.

        The batches from the current position to the end of the epoch are cut into blocks of
        adjacent ones; a worker gets the blocks ``worker``, ``worker + num_workers``, and so on.
        Each is iterated before the next is taken. ``state_dict`` counts what other workers read:
        it is the position after the last batch handed out, and at the end that of the next epoch.

        This one reads every batch and hands out its own. Override it where batches can be passed
        over unread, and cut where one worker should read on: where a batch begins in another file
        or row group than the one before.
        """
        for number, rows in enumerate(self):
            if number % num_workers == worker:
                yield (rows,)

    def num_blocks(self) -> int | None:
        """How many blocks ``blocks`` cuts, for all workers together; None: reading shows it.

        Override it together with ``blocks`` where it is known: then readers that are handed blocks
        one by one know how many to ask for.
        """
        return None

    def skip(self, num_batches: int) -> int:
        """Pass over the next batches, and say how many there were: fewer at the end of the epoch.

        As if they had been iterated over: where there are fewer than ``num_batches``, the position
        returns to the start. Override it where batches can be passed over unread.
        """
        return sum(1 for _ in islice(self, num_batches))

    def num_left(self) -> int | None:
        """Batches from the current position to the end of the epoch; None: reading shows it.

        Of a run that goes on with another number of ranks it says how long it takes.
        """
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out: JSON values only, equal on every rank."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a position.

        Raises:
            DataError: the state belongs to other data or another batch size.
        """


class Dataset(Plugin, ABC):
    """A table of training rows.

    Example:
        class Squares(Dataset):
            "Numbers and whether they are even."

            name = "acme.squares"

    Attributes:
        row_options: options that say which rows are read, of which split and in which order, and
            nothing of what a row becomes: a checkpoint is scored with other ones, and a run that
            goes on from it has the same.
        trained_schema: set before ``to_score`` is called where the data is not there, which the
            model was trained on: what its ``schema`` was.
        trained_kinds: likewise of ``kinds``; empty of checkpoints of older versions, too.
    """

    kind: ClassVar[str] = "dataset"
    row_options: ClassVar[frozenset[str]] = frozenset()
    trained_schema: FeatureSchema | None = None
    trained_kinds: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        """What its methods raise names the plugin that raised it, though wrappers call it."""
        super().__init_subclass__(**options)
        guard_methods(cls, _GUARDED)

    @abstractmethod
    def prepare(self) -> None:
        """Check the location and make what is missing (a generated table, a cache), once.

        Called in one process before any rank reads.

        Raises:
            DataError: the location is missing or is not what the options say.
        """

    @abstractmethod
    def schema(self) -> FeatureSchema:
        """Which columns ``reader`` yields."""

    def left_out(self) -> Mapping[str, str]:
        """Columns that are stored and that nothing reads, each with why, in a few words.

        Raises:
            DataError: the data is missing or wrong.
        """
        return {}

    def mistakes(self) -> Sequence[tuple[tuple[str, ...], str]]:
        """Options that do not suit the data, as what says its columns shows: no row is read.

        Each by the keys that lead to it, ``("columns", "devise")``, and what is wrong. They are
        told with the lines of the file, by ``recd validate`` and before a run prepares the data.
        Nothing of data that is not there: ``prepare`` says so.
        """
        return ()

    def identity(self) -> dict[str, Any]:
        """What tells these rows from others, JSON values; equal wherever files lie.

        As the names of files, their sizes and a digest of what is quick to read of them. Nothing
        here: the options say it all, those of ``free_options`` aside. A run goes on from a
        checkpoint only where this is what it was. Each rank is asked as it starts, as all
        have to see the same rows.

        Raises:
            DataError: the data is missing or wrong.
        """
        return {}

    def splits(self) -> tuple[Split, ...]:
        """The splits that ``reader`` can read; a dataset with a test split says so."""
        return ("train",)

    @abstractmethod
    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        """A reader of this rank's share of a split.

        Raises:
            DataError: there is no such split, or it has too few rows for one batch on every rank.
        """

    def session_reader(
        self,
        *,
        rank: int,  # noqa: ARG002
        world_size: int,  # noqa: ARG002
        batch_size: int,  # noqa: ARG002
        split: Split,
    ) -> Reader:
        """As ``reader``, with the column of the session besides those of ``schema``.

        Its states are those of ``reader``. Wrappers that keep sessions together read by it.

        Raises:
            DataError: as ``reader``; or this dataset does not say which rows are of one session.
        """
        raise DataError(
            f"{self.name} does not say which rows of the {split} split belong to one session; "
            "leave sessions out, or take a dataset that does"
        )

    def statistics(self) -> TableStatistics | None:
        """How much the lists of the training split repeat, where it is known without reading it.

        The planner takes the lengths of features from it and what deduplication saves; where there
        is none it looks at the first rows.

        Raises:
            DataError: what the files say of themselves is damaged.
        """
        return None

    def label_mean(self) -> float | None:
        """Return the mean label of the training split, None if it is not known without reading it.

        The built-in model starts at it: the bias of its last layer is the logit.
        """
        return None

    def session_keys(self) -> SessionKeys | None:
        """The columns of session and time that ``scan`` yields; None where it cannot scan."""
        return None

    def scan(self, split: Split = "train") -> Iterator[Rows]:
        """Every row of a split once, in stored order, in batches of any size.

        Besides the columns of ``schema`` it yields those of ``session_keys``. ``recd analyze`` and
        ``recd cluster`` read a dataset by it.

        Raises:
            DataError: there is no such split, or this dataset knows no sessions.
        """
        raise DataError(
            f"{self.name} does not say which rows belong to one session, so the {split} split "
            "cannot be scanned; take a dataset that does, or a Parquet file or folder"
        )

    def keys(self) -> Mapping[str, str]:
        """The columns of ``scan`` that predictions carry, so that they can be joined back.

        By each its name in them: that of the user's table.
        """
        keys = self.session_keys()
        names = () if keys is None else (keys.session, keys.timestamp)
        return {name: name for name in names}

    def texts(self, feature: str) -> Mapping[int, str]:  # noqa: ARG002
        """The text of each id of a sparse feature that is text in the data; empty if unknown."""
        return {}

    def kinds(self) -> Mapping[str, str]:
        """What values of columns are, in a word, where others of another kind are never the same.

        Kept in checkpoints, so that ``to_score`` may refuse what training would have taken for
        other ids; empty where there is nothing to tell apart.
        """
        return {}

    def storage(self) -> Storage | None:
        """How the store of a URL is reached: the option ``storage``, where there is one.

        ``recd predict --keep`` reads columns of a table that is scored by it.
        """
        option = getattr(self.options, "storage", None)
        return option if isinstance(option, Storage) else None

    def to_score(self, location: str) -> Dataset:  # noqa: ARG002
        """The same columns, by the same options, of another table, to score all of its rows.

        Its ``scan("train")`` yields every row in stored order, whatever the options say of rows to
        leave out, with the columns of ``schema``, which is this one's, and those of ``keys``. The
        label need not be there: it is 0 then. Where this one's own data is not there, its columns
        are those of ``trained_schema``.

        Args:
            location: a path or URL, as an option names that of the training split.

        Raises:
            DataError: this dataset cannot do that; or a column is missing.
        """
        raise DataError(f"{self.name} cannot score other tables")


class DatasetWrapper(Dataset):
    """The rows of another dataset in another order; stands under ``dataset.wrap``.

    Training and the planner's sample are read through it. Evaluation, where order does not matter,
    and what counts rows (profiles, ``recd analyze``) read the dataset itself, so a wrapper keeps
    each row, once, and all its columns; one that adds rows says so by ``rows_together``.
    Overriding ``reader`` is all that there is to do.

    Attributes:
        inner: the dataset that is wrapped, maybe a wrapper itself.
        lookups: which rows of which tables samples look up; known where it is asked for.
    """

    inner: Dataset
    lookups: Lookups

    @property
    def rows_together(self) -> int:
        """Rows of the training split in place of one of ``inner``, all in one batch.

        Above 1 for a wrapper that adds rows: it takes batch sizes that are multiples of it, and
        its rows need not be those of ``inner``.
        """
        return 1

    def over(self, inner: Dataset, lookups: Lookups) -> Self:
        """A wrapper with the same options around ``inner``; this one is left as it is."""
        wrapped = type(self)(self.options).placed(self.stands_at)
        wrapped.inner = inner
        wrapped.lookups = lookups
        return wrapped

    def prepare(self) -> None:
        """What the inner dataset does."""
        self.inner.prepare()

    def check(self) -> None:
        """Refuse what cannot be; ``lookups`` knows the model. Called before training reads.

        Raises:
            RecdError: why not; the line of the wrapper's entry is added to it.
        """

    def identity(self) -> dict[str, Any]:
        """The inner dataset's."""
        return self.inner.identity()

    def schema(self) -> FeatureSchema:
        """The inner dataset's."""
        return self.inner.schema()

    def left_out(self) -> Mapping[str, str]:
        """The inner dataset's."""
        return self.inner.left_out()

    def splits(self) -> tuple[Split, ...]:
        """The inner dataset's."""
        return self.inner.splits()

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        """What ``reader`` makes of the inner dataset's ``session_reader``.

        Raises:
            DataError: as ``reader``; or the dataset knows no sessions.
        """
        inner = WithSessions(PluginOptions()).over(self.inner, self.lookups)
        return self.over(inner, self.lookups).reader(
            rank=rank, world_size=world_size, batch_size=batch_size, split=split
        )

    def statistics(self) -> TableStatistics | None:
        """The inner dataset's."""
        return self.inner.statistics()

    def label_mean(self) -> float | None:
        """Return the inner dataset's; override it in a wrapper that adds rows."""
        return self.inner.label_mean() if self.rows_together == 1 else None

    def session_keys(self) -> SessionKeys | None:
        """The inner dataset's."""
        return self.inner.session_keys()

    def scan(self, split: Split = "train") -> Iterator[Rows]:
        """The inner dataset's: in stored order."""
        return self.inner.scan(split)

    def keys(self) -> Mapping[str, str]:
        """The inner dataset's."""
        return self.inner.keys()

    def texts(self, feature: str) -> Mapping[int, str]:
        """The inner dataset's."""
        return self.inner.texts(feature)

    def storage(self) -> Storage | None:
        """The inner dataset's."""
        return self.inner.storage()

    def to_score(self, location: str) -> Dataset:
        """The inner dataset's: in stored order."""
        return self.inner.to_score(location)

    def expected_groups(self) -> Mapping[str, float]:
        """The expected share of samples by group of ``Rows``; empty where nothing is expected.

        ``recd run`` shows them next to those that it counts.
        """
        return {}


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
