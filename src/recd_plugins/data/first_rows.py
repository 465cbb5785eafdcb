"""The first rows as training reads them, for those who look at them before it begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Never

from recd_plugins.data.check_batch import check_rows
from recd_plugins.errors import PluginError, SetupError
from recd_plugins.interfaces import (
    Dataset,
    DatasetWrapper,
    FeatureLookups,
    Lookups,
    Rows,
    Table,
    TablePart,
)
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry, RunConfig


@dataclass(frozen=True)
class FirstRows:
    """The first batch of the training split, the same on every rank.

    Attributes:
        rows: of the batch.
        dataset: in the wrappers that have put them into their order.
        left_out: wrappers that order rows by what the model looks up, which is not known yet.
    """

    rows: Rows
    dataset: Dataset
    left_out: tuple[Entry[DatasetWrapper], ...] = ()

    def batches(self, count: int) -> Iterator[Rows]:
        """The batches after it, of as many rows, until there are ``count`` with it."""
        batch_size = len(self.rows)
        reader = self.dataset.reader(rank=0, world_size=1, batch_size=batch_size, split="train")
        with plugin_call(self.dataset, "reading"):
            yield from islice(reader, 1, count)


def read_first_rows(registry: RunConfig) -> FirstRows:
    """The first batch in the order of the dataset's wrappers, as many of them as can be asked yet.

    Raises:
        DataError: the data is missing or wrong.
        PluginError: the dataset or a wrapper failed.
    """
    for count in range(len(registry.wrappers), 0, -1):
        inner = replace(registry, wrappers=registry.wrappers[:count])
        dataset = inner.wrap_dataset(UnknownLookups())
        try:
            return FirstRows(_read(registry, dataset), dataset, registry.wrappers[count:])
        except _AskedTooEarly:
            continue
    return FirstRows(_read(registry, registry.dataset), registry.dataset, registry.wrappers)


def first_rows(registry: RunConfig) -> Rows:
    """The rows of ``read_first_rows``."""
    return read_first_rows(registry).rows


def dataset_in_order(registry: RunConfig) -> Dataset:
    """The dataset in those wrappers that can be asked before the model is prepared."""
    return read_first_rows(registry).dataset if registry.wrappers else registry.dataset


def _read(registry: RunConfig, dataset: Dataset) -> Rows:
    batch_size = registry.training.batch_size
    reader = dataset.reader(rank=0, world_size=1, batch_size=batch_size, split="train")
    with plugin_call(dataset, "reading"):
        rows = next(iter(reader), None)
    if rows is None:
        raise PluginError(
            f"{dataset.title}: its reader has no batch; where a split has too few rows for "
            "one, `reader` raises a DataError that says so"
        )
    check_rows(dataset, rows, batch_size)
    return rows


class _AskedTooEarly(SetupError):
    """A wrapper asks for what is known when the model is prepared."""


class UnknownLookups(Lookups):
    """The lookups of a model that nobody knows yet."""

    @property
    def tables(self) -> Sequence[Table]:
        """Not known."""
        return self._unknown()

    @property
    def parts(self) -> Sequence[TablePart]:
        """Likewise."""
        return self._unknown()

    def of(self, rows: Rows, features: Sequence[str]) -> Mapping[str, FeatureLookups]:  # noqa: ARG002
        """Likewise: rows that are put together by it are not like those that follow."""
        return self._unknown()

    def _unknown(self) -> Never:
        raise _AskedTooEarly("a sample is read before the model is prepared")
