"""Conversion of rows to model inputs, in the training process or in a reader worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ParamSpec, Self, TypeVar

from recd_plugins.config import RunConfig
from recd_plugins.config.run_config import check_num_ids
from recd_plugins.data.checks import check_ids, check_numbers
from recd_plugins.data.lower import lower
from recd_plugins.data.prepared import (
    PreparedModel,
    plan_placement,
    read_first_rows,
    session_column,
    wrapped_dataset,
)
from recd_plugins.data.preprocess import Preprocess, fitted_steps
from recd_plugins.data.rows import session_ids
from recd_plugins.interfaces import Feed, Rows
from recd_plugins.interfaces.batch import Batch, MakingTimes, ModelInput, Placement
from recd_plugins.interfaces.plugin import plugin_call, plugin_items

P = ParamSpec("P")
T = TypeVar("T")


class RowPipeline(Feed):
    """Converts batches of Arrow rows to model inputs. Picklable, for reader processes.

    Creating a pipeline fits the converter and preprocessing steps that are not fitted yet. If
    ``placement`` is None, model inputs are for the built-in model. ``num_embeddings`` maps features
    to the rows of their tables, to check ids. Ids of other features are not checked.

    Raises:
        RegistryError: a table has fewer rows than the number of ids after preprocessing.
    """

    def __init__(
        self,
        registry: RunConfig,
        placement: Placement | None = None,
        num_embeddings: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        fit_converter(registry)
        self._schema = schema = registry.dataset.schema()
        check_num_ids(registry, schema, num_embeddings)
        self._converter = registry.converter
        self._preprocess = Preprocess(fitted_steps(registry, schema), schema.dense)
        self._placement = plan_placement(registry, schema) if placement is None else placement
        self._num_embeddings = dict(num_embeddings)
        self._dataset = wrapped_dataset(registry)
        self._session = session_column(self._dataset)

    @classmethod
    def of_model(cls, registry: RunConfig, prepared: PreparedModel | None) -> Self:
        """Return the pipeline for a prepared model, or for the built-in model if None."""
        if prepared is None:
            return cls(registry)
        return cls(registry, prepared.placement, prepared.num_embeddings)

    def read(self, reader: Iterable[Rows]) -> Iterator[ModelInput]:
        """Yield a model input, with the seconds to produce it, for each batch of rows."""
        rows_of_batches = self.reading(reader)
        while True:
            start = time.perf_counter()
            rows = next(rows_of_batches, None)
            if rows is None:
                return
            fill = time.perf_counter() - start
            converted, convert = _timed(self._convert, rows)
            batch, preprocess = _timed(self._transform, converted, rows)
            lowered, transfer = _timed(lower, batch, self._placement)
            making = MakingTimes(fill, convert, preprocess, transfer)
            sessions = None if self._session is None else session_ids(rows, self._session)
            yield replace(lowered, making=making, sessions=sessions)

    def batch(self, rows: Rows) -> Batch:
        """Return a converted and preprocessed batch, before conversion to a ModelInput."""
        return self._transform(self._convert(rows), rows)

    def _convert(self, rows: Rows) -> Batch:
        with plugin_call(self._converter, "convert"):
            batch = self._converter.convert(rows, self._schema)
        check_numbers(batch, self._schema, rows)
        return batch

    def _transform(self, batch: Batch, rows: Rows) -> Batch:
        batch = self._preprocess(batch, rows)
        check_ids(batch, self._num_embeddings, rows, self._preprocess.made_by)
        return batch

    def reading(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items of a dataset's iterable, and add the dataset's name to errors."""
        return plugin_items(self._dataset, "reader", items)


def _timed(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> tuple[T, float]:
    start = time.perf_counter()
    result = function(*arguments, **options)
    return result, time.perf_counter() - start


def fit_converter(registry: RunConfig, rows: Rows | None = None) -> None:
    """Fit the converter on the first batch of the training split, if not fitted yet."""
    if registry.converter.is_fitted:
        return
    if rows is None:
        rows = read_first_rows(registry).rows
    with plugin_call(registry.converter, "fit"):
        registry.converter.fit(rows, registry.dataset.schema())
    registry.converter.is_fitted = True
