"""Conversion of rows to model inputs, in the trainer or in a reader worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from recd_plugins.config import RunConfig
from recd_plugins.data.checks import check_ids, check_numbers
from recd_plugins.data.lower import lower
from recd_plugins.data.prepared import (
    PreparedModel,
    first_rows,
    plan_placement,
    session_column,
    wrapped_dataset,
)
from recd_plugins.data.preprocess import Preprocess, build_preprocess, feature_steps, num_ids_of
from recd_plugins.data.rows import session_ids
from recd_plugins.interfaces import Converter, FeatureSchema, Rows
from recd_plugins.interfaces.batch import Batch, MakingTimes, ModelInput, Placement
from recd_plugins.interfaces.plugin import plugin_call, plugin_items
from recd_plugins.runtime.errors import Problem, RegistryError

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Transforms:
    """The parts of a ``RowPipeline`` that are pickled for readers.

    Attributes:
        schema: schema of the dataset.
        converter: the fitted converter.
        preprocess: preprocessing with fitted steps.
        placement: placement of features in the model.
        num_embeddings: number of table rows, keyed by feature; unknown ones are missing.
    """

    schema: FeatureSchema
    converter: Converter
    preprocess: Preprocess
    placement: Placement
    num_embeddings: Mapping[str, int]

    @classmethod
    def of(
        cls,
        registry: RunConfig,
        placement: Placement | None = None,
        num_embeddings: Mapping[str, int] | None = None,
    ) -> Transforms:
        """Create the transforms of a registry whose converter is fitted."""
        schema = registry.dataset.schema()
        _check_tables(registry, schema, num_embeddings or {})
        return cls(
            schema,
            registry.converter,
            build_preprocess(registry, schema),
            plan_placement(registry, schema) if placement is None else placement,
            num_embeddings or {},
        )


def _check_tables(
    registry: RunConfig, schema: FeatureSchema, num_embeddings: Mapping[str, int]
) -> None:
    """Refuse tables with fewer rows than the number of ids that the last step produces."""
    problems = []
    for feature, steps in feature_steps(registry, schema).items():
        made, rows = num_ids_of(steps[-1]) if steps else None, num_embeddings.get(feature)
        if made is None or rows is None or made <= rows:
            continue
        path, line, field = steps[-1].stands_at or (str(registry.path), 0, "preprocessing")
        message = (
            f"{steps[-1].name} makes {made:,} ids of {feature}, whose table has {rows:,} rows: "
            "raise num_embeddings, or make fewer ids"
        )
        problems.append(Problem(path, line, field, message))
    if problems:
        raise RegistryError(problems)


class RowPipeline:
    """Converts, preprocesses and lowers batches of rows.

    Args:
        registry: registry with the dataset.
        transforms: fitted transforms; None for the demo model's, without checks of ids.
    """

    def __init__(self, registry: RunConfig, transforms: Transforms | None = None) -> None:
        self._transforms = transforms or fitted_transforms(registry)
        self._dataset = wrapped_dataset(registry)
        self._session = session_column(self._dataset)

    def read(self, batches: Iterable[Rows]) -> Iterator[ModelInput]:
        """Yield model inputs with their making times; rows are read on demand."""
        rows_of_batches = self.reading(batches)
        while True:
            start = time.perf_counter()
            rows = next(rows_of_batches, None)
            if rows is None:
                return
            fill = time.perf_counter() - start
            converted, convert = _timed(self._convert, rows)
            batch, preprocess = _timed(self._transform, converted, rows)
            lowered, transfer = _timed(lower, batch, self._transforms.placement)
            making = MakingTimes(fill, convert, preprocess, transfer)
            sessions = None if self._session is None else session_ids(rows, self._session)
            yield replace(lowered, groups=rows.groups, making=making, sessions=sessions)

    def batch(self, rows: Rows) -> Batch:
        """Convert and preprocess one batch, but do not lower it."""
        return self._transform(self._convert(rows), rows)

    def _convert(self, rows: Rows) -> Batch:
        converter, schema = self._transforms.converter, self._transforms.schema
        with plugin_call(converter, "convert"):
            batch = converter.convert(rows, schema)
        check_numbers(batch, schema, rows)
        return batch

    def _transform(self, batch: Batch, rows: Rows) -> Batch:
        preprocess = self._transforms.preprocess
        batch = preprocess(batch, rows)
        check_ids(batch, self._transforms.num_embeddings, rows, preprocess.made_by)
        return batch

    def reading(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and add the dataset's name to errors."""
        return plugin_items(self._dataset, "reading", items)


def _timed(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> tuple[T, float]:
    start = time.perf_counter()
    result = function(*arguments, **options)
    return result, time.perf_counter() - start


def fitted_transforms(registry: RunConfig, prepared: PreparedModel | None = None) -> Transforms:
    """Return the transforms of a registry, fitted, for a prepared model or the demo model."""
    fit_converter(registry)
    if prepared is None:
        return Transforms.of(registry)
    return Transforms.of(registry, prepared.placement, prepared.num_embeddings)


def fit_converter(registry: RunConfig, rows: Rows | None = None) -> None:
    """Fit the converter once, on the first rows of the training split (same on every rank)."""
    if registry.converter.is_fitted:
        return
    if rows is None:
        rows = first_rows(registry)
    with plugin_call(registry.converter, "fit"):
        registry.converter.fit(rows, registry.dataset.schema())
    registry.converter.is_fitted = True
