"""The dataset of a registry in its wrappers, and what wrappers may ask of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Never

import numpy as np

from recd_plugins.errors import PluginError, SetupError
from recd_plugins.interfaces import (
    Dataset,
    DatasetWrapper,
    FeatureLookups,
    Lookups,
    PluginOptions,
    Rows,
    Table,
    TableStrategy,
)
from recd_plugins.interfaces.dataset import WithSessions
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry, RunConfig

if TYPE_CHECKING:
    from torch import Tensor

    from recd_plugins.data.preprocess import Preprocess


class RegistryLookups(Lookups):
    """The table rows that samples look up, after a registry's preprocessing. It can be pickled.

    Args:
        registry: its preprocessing is used.
        tables: of the model; None where none is prepared.
        parts: what its entries do to them.
    """

    def __init__(
        self,
        registry: RunConfig,
        tables: Sequence[Table] | None = None,
        parts: Sequence[TableStrategy] = (),
    ) -> None:
        self._registry = registry
        self._tables = tables
        self._parts = parts

    @property
    def tables(self) -> Sequence[Table]:
        """See ``Lookups.tables``."""
        if self._tables is None:
            raise self._no_model()
        return self._tables

    @property
    def parts(self) -> Sequence[TableStrategy]:
        """See ``Lookups.parts``."""
        if self._tables is None:
            raise self._no_model()
        return self._parts

    def of(self, rows: Rows, features: Sequence[str]) -> Mapping[str, FeatureLookups]:
        """See ``Lookups.of``. Each list of a feature in layout ``list_dict`` is preprocessed once.

        Other features are not searched for equal lists: that takes longer than to look at each.
        """
        import torch

        from recd_plugins.data.arrow import dictionary_column, sparse_column
        from recd_plugins.sparse.from_columns import ikjts_from_dictionaries, kjt_from_columns
        from recd_plugins.values.batch import Batch

        dictionaries, columns = {}, {}
        for name in features:
            if (dictionary := dictionary_column(rows, name)) is not None:
                dictionaries[name] = dictionary
            else:
                columns[name] = sparse_column(rows, name)
        nothing = torch.empty(len(rows), 0)
        batch = self._preprocess(
            Batch(
                nothing,
                nothing.sum(1),
                kjt_from_columns(columns, len(rows)) if columns else None,
                ikjts_from_dictionaries(
                    [{name: column} for name, column in dictionaries.items()], len(rows)
                ),
            )
        )
        found = {}
        if batch.kjt is not None:
            for name, jagged in batch.kjt.to_dict().items():
                found[name] = _lookups(jagged.values(), jagged.lengths(), None)
        for ikjt in batch.ikjts:
            inverse = ikjt.inverse_lookup().long()
            for name, jagged in ikjt.to_unique_kjt().to_dict().items():
                found[name] = _lookups(jagged.values(), jagged.lengths(), inverse)
        return found

    def _no_model(self) -> SetupError:
        return SetupError(
            f"{self._registry.path}: which tables there are is known when prepare has "
            "seen the model: read by what it returns, as prepared.dataloader()"
        )

    @cached_property
    def _preprocess(self) -> Preprocess:
        from recd_plugins.data.fitted_steps import fitted_steps
        from recd_plugins.data.preprocess import Preprocess

        return Preprocess(fitted_steps(self._registry, self._registry.dataset.schema()))


def _lookups(values: Tensor, lengths: Tensor, inverse: Tensor | None) -> FeatureLookups:
    offsets = np.concatenate(([0], np.cumsum(lengths.numpy(), dtype=np.int64)))
    return FeatureLookups(values.numpy(), offsets, None if inverse is None else inverse.numpy())


class _AskedTooEarly(SetupError):
    """A wrapper asks for what is known when the model is prepared."""


class UnknownLookups(Lookups):
    """The lookups of a model that is not prepared yet."""

    @property
    def tables(self) -> Sequence[Table]:
        """Not known."""
        return self._unknown()

    @property
    def parts(self) -> Sequence[TableStrategy]:
        """Not known."""
        return self._unknown()

    def of(self, rows: Rows, features: Sequence[str]) -> Mapping[str, FeatureLookups]:  # noqa: ARG002
        """Not known: rows in an order made by it are not like those that follow."""
        return self._unknown()

    def _unknown(self) -> Never:
        raise _AskedTooEarly("a sample is read before the model is prepared")


@dataclass(frozen=True)
class FirstRows:
    """The first batch of the training split, the same on every rank.

    Attributes:
        rows: of the batch.
        dataset: in the wrappers that have ordered them.
        left_out: wrappers that order rows by the model's lookups, which are not known yet.
    """

    rows: Rows
    dataset: Dataset
    left_out: tuple[Entry[DatasetWrapper], ...] = ()

    def batches(self, count: int) -> Iterator[Rows]:
        """Yield the batches after it, of as many rows, until there are ``count`` with it."""
        batch_size = len(self.rows)
        reader = self.dataset.reader(rank=0, world_size=1, batch_size=batch_size, split="train")
        with plugin_call(self.dataset, "reading"):
            yield from islice(reader, 1, count)


def read_first_rows(registry: RunConfig) -> FirstRows:
    """Read the first batch in the order of the dataset's wrappers, as many as can be asked yet."""
    for count in range(len(registry.wrappers), 0, -1):
        inner = replace(registry, wrappers=registry.wrappers[:count])
        dataset = inner.wrap_dataset(UnknownLookups())
        try:
            return FirstRows(_read(registry, dataset), dataset, registry.wrappers[count:])
        except _AskedTooEarly:
            continue
    return FirstRows(_read(registry, registry.dataset), registry.dataset, registry.wrappers)


def first_rows(registry: RunConfig) -> Rows:
    """Return the rows of ``read_first_rows``."""
    return read_first_rows(registry).rows


def dataset_in_order(registry: RunConfig) -> Dataset:
    """Return the dataset in those wrappers that can be asked before the model is prepared."""
    return read_first_rows(registry).dataset if registry.wrappers else registry.dataset


def _read(registry: RunConfig, dataset: Dataset) -> Rows:
    size = registry.training.batch_size
    reader = dataset.reader(rank=0, world_size=1, batch_size=size, split="train")
    with plugin_call(dataset, "reading"):
        rows = next(iter(reader), None)
    if rows is None:
        raise PluginError(
            f"{dataset.title}: its reader has no batch; where a split has too few rows for "
            "one, `reader` raises a DataError that says so"
        )
    return rows


def wrapped_dataset(registry: RunConfig) -> Dataset:
    """Return the dataset of a registry in its wrappers, which know no model."""
    return registry.wrap_dataset(RegistryLookups(registry))


def with_sessions(dataset: Dataset) -> tuple[Entry[DatasetWrapper], ...]:
    """Return the wrapper whose rows say their sessions; none where the dataset knows none."""
    if dataset.session_keys() is None or type(dataset).session_reader is Dataset.session_reader:
        return ()
    return (Entry(WithSessions(PluginOptions()), (), "dataset", 0),)


def session_column(dataset: Dataset) -> str | None:
    """Return the column of the session, of a dataset wrapped by ``with_sessions``."""
    keys = dataset.session_keys() if isinstance(dataset, WithSessions) else None
    return None if keys is None else keys.session


def smallest_batch(dataset: Dataset) -> int:
    """Return the number of rows that training batches of a dataset are multiples of."""
    size = 1
    while isinstance(dataset, DatasetWrapper):
        size *= dataset.rows_together
        dataset = dataset.inner
    return size
