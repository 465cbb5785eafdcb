"""The input of a model, made of a reader's rows in the trainer or in a reader worker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar
from weakref import ref

from recd_plugins.data.check_batch import check_batch, check_rows
from recd_plugins.data.check_ids import check_ids
from recd_plugins.data.check_numbers import check_numbers
from recd_plugins.data.first_rows import first_rows
from recd_plugins.data.lookups import wrapped_dataset
from recd_plugins.data.lower import lower
from recd_plugins.data.own_memory import OwnMemory
from recd_plugins.data.prepared import PreparedModel
from recd_plugins.data.sessions import session_column, session_ids
from recd_plugins.data.transforms import Transforms
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Converter, Rows
from recd_plugins.plugin_call import plugin_call, plugin_items
from recd_plugins.registry import RunConfig
from recd_plugins.values.batch import Batch
from recd_plugins.values.model_input import MakingTimes, ModelInput
from recd_plugins.words import did_you_mean

P = ParamSpec("P")
T = TypeVar("T")


class RowPipeline:
    """Converts, preprocesses and lowers batches of rows, and looks at what plugins return.

    Args:
        registry: whose dataset is read.
        transforms: say what model the inputs suit; the demo model, with ids that are not checked,
            without them.

    Raises:
        DataError: the data is missing or wrong.
        PluginError: a plugin failed, or returned what its kind does not allow.
        RegistryError: a pattern matches no feature.
    """

    def __init__(self, registry: RunConfig, transforms: Transforms | None = None) -> None:
        transforms = transforms or fitted_transforms(registry)
        self._dataset = wrapped_dataset(registry)
        self._session = session_column(self._dataset)
        self._batch_size = registry.training.batch_size
        self._schema = transforms.schema
        self._converter = transforms.converter
        steps = (entry.plugin.name for entry in registry.preprocessing)
        self._makers = [*dict.fromkeys((self._converter.name, *steps))]
        self._preprocess = transforms.preprocess
        self._placement = transforms.placement
        self._num_embeddings = transforms.num_embeddings
        self._before: ref[Batch] | None = None

    def read(self, batches: Iterable[Rows]) -> Iterator[ModelInput]:
        """What batches of a reader become, read when it is asked for, with the seconds it took."""
        rows_of_batches = self.reading(batches)
        own_memory = OwnMemory(self._makers)
        while True:
            start = time.perf_counter()
            rows = next(rows_of_batches, None)
            if rows is None:
                return
            fill = time.perf_counter() - start
            converted, convert = _timed(self._convert, rows)
            batch, preprocess = _timed(self._transform, converted, rows)
            lowered, transfer = _timed(lower, batch, self._placement)
            own_memory.check(lowered)
            making = MakingTimes(fill, convert, preprocess, transfer)
            sessions = None if self._session is None else session_ids(rows, self._session)
            yield replace(lowered, groups=rows.groups, making=making, sessions=sessions)

    def batch(self, rows: Rows) -> Batch:
        """What one batch of a reader becomes before it is lowered."""
        return self._transform(self._convert(rows), rows)

    def _convert(self, rows: Rows) -> Batch:
        check_rows(self._dataset, rows, self._batch_size)
        with plugin_call(self._converter, "convert"):
            batch = self._converter.convert(rows, self._schema)
        check_batch(self._converter, batch, len(rows), self._schema)
        if self._before is not None and self._before() is batch:
            raise PluginError(
                f"{self._converter.title}: convert returned the batch of the rows before once "
                "more: return a Batch of its own for each call"
            )
        self._before = ref(batch)
        check_numbers(batch, self._schema, rows)
        return batch

    def _transform(self, batch: Batch, rows: Rows) -> Batch:
        batch = self._preprocess(batch, rows)
        check_ids(batch, self._num_embeddings, rows, self._preprocess.made_by)
        return batch

    def reading(self, items: Iterable[T]) -> Iterator[T]:
        """The same items, which code of the dataset yields: what it raises names the dataset."""
        return plugin_items(self._dataset, "reading", items)


def _timed(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> tuple[T, float]:
    """What ``function`` returns, and its seconds."""
    start = time.perf_counter()
    result = function(*arguments, **options)
    return result, time.perf_counter() - start


def fitted_transforms(registry: RunConfig, prepared: PreparedModel | None = None) -> Transforms:
    """The transforms of a registry, its converter fitted, for the model that is prepared.

    Args:
        registry: its converter and preprocessing.
        prepared: None: for the demo model, with ids that are not checked.

    Raises:
        RecdError: what ``RowPipeline`` raises.
    """
    fit_converter(registry)
    if prepared is None:
        return Transforms.of(registry)
    return Transforms.of(registry, prepared.placement, prepared.num_embeddings)


def fit_converter(registry: RunConfig, rows: Rows | None = None) -> None:
    """Show the converter the first rows of the training split, the same on every rank, once.

    Args:
        registry: whose converter it is.
        rows: ``first_rows``, which are read without it.
    """
    if registry.converter.is_fitted:
        return
    if rows is None:
        rows = first_rows(registry)
    with plugin_call(registry.converter, "fit"):
        registry.converter.fit(rows, registry.dataset.schema())
    with plugin_call(registry.converter, "dedupe_factors"):
        factors = registry.converter.dedupe_factors()
    _check_factors(registry.converter, factors, registry.dataset.schema().sparse)
    registry.converter.is_fitted = True


def _check_factors(converter: Converter, factors: object, sparse: Sequence[str]) -> None:
    """Refuse what planning could not reckon with."""
    if not isinstance(factors, Mapping):
        raise PluginError(
            f"{converter.title}: dedupe_factors returned {factors!r:.80}; expected a mapping"
        )
    for name, factor in factors.items():
        if name not in sparse:
            raise PluginError(
                f"{converter.title}: dedupe_factors names {name!r}, which is no sparse feature"
                + did_you_mean(str(name), sparse)
            )
        if not (isinstance(factor, int | float) and math.isfinite(factor) and factor > 0):
            raise PluginError(
                f"{converter.title}: dedupe_factors of feature {name} is {factor!r:.80}; expected "
                "ids for one that is stored, a finite number above 0"
            )
