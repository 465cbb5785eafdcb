"""Conversion of rows to model inputs, in the training process or in a reader worker.

The inputs of TorchRec's embedding modules (docs/exactness.md) are:

- Pooled features: a KJT with variable batch per feature (VBE) for an EmbeddingBagCollection. Unique
  rows are looked up, and TorchRec expands after its output all-to-all.
- Replicated features: a plain KJT of all B rows for a data-parallel EmbeddingBagCollection.
- Sequence features: a plain KJT of unique rows for an EmbeddingCollection. The model pools them and
  repeats the vectors with ``inverse_lookup``. A partial IKJT becomes one row with all stored ids,
  and ``ModelInput.unique_rows`` selects the unique rows from the embeddings.

Pooled and replicated features of partial IKJTs are converted to exact IKJTs first. An IKJT is
RecD's InverseKeyedJaggedTensor of unique rows. In a partial IKJT, overlapping rows share ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ParamSpec, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.config import RunConfig
from recd_plugins.config.run_config import check_num_ids
from recd_plugins.data.checks import check_ids, check_numbers
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
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.index_select import Segments, jagged_index_select
from recd_plugins.sparse.jagged import plain_kjt, runs_of_equal_rows, weights_of
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor
from recd_plugins.sparse.request_rows import RequestRows

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


@dataclass(frozen=True)
class _StoredFeature:
    """The ``num_rows`` stored rows of one feature, without duplicates if it is deduplicated.

    Attributes:
        jagged: the stored rows, or with ``segments`` a single row with all stored ids.
        inverse: int64 ``[B]``, the stored row of each batch row; None if all B rows are stored.
        segments: range of stored ids of each row, for partial deduplication; otherwise None.
    """

    jagged: JaggedTensor
    num_rows: int
    inverse: Tensor | None
    segments: Segments | None = None

    def expanded(self) -> JaggedTensor:
        """Return all B batch rows of the feature, including duplicates."""
        if self.inverse is None:
            return self.jagged
        return jagged_index_select(self.jagged, self.inverse)


def lower(batch: Batch, placement: Placement) -> ModelInput:
    """Convert a batch to the model input, whose tensors have the features listed in ``placement``.

    Raises:
        DataError: some features of one KeyedJaggedTensor have weights, and others do not.
    """
    features = dict(_stored_features(batch))
    features |= _exact(batch.partials, {*placement.pooled, *placement.replicated})
    sequences = features | dict(_stored(batch.partials, set(placement.sequence)))
    sequence = [sequences[name] for name in placement.sequence]
    stride = max((feature.jagged.lengths().numel() for feature in sequence), default=0)
    sequence_features = plain_kjt(
        placement.sequence, [feature.jagged for feature in sequence], stride
    )
    return ModelInput(
        dense_features=batch.dense_features,
        sparse_features=_variable_batch_kjt(placement.pooled, features, batch.batch_size),
        labels=batch.labels,
        replicated_features=plain_kjt(
            placement.replicated,
            [features[name].expanded() for name in placement.replicated],
            batch.batch_size,
        ),
        sequence_features=sequence_features,
        num_unique={name: sequences[name].num_rows for name in placement.sequence},
        inverse_lookup={
            name: inverse
            for name in placement.sequence
            if (inverse := sequences[name].inverse) is not None
        },
        segments={
            name: segments
            for name in placement.sequence
            if (segments := sequences[name].segments) is not None
        },
        longest=_longest(placement.sequence, sequence, sequence_features),
        request=_request_rows(batch, features | sequences),
    )


def _request_rows(batch: Batch, features: Mapping[str, _StoredFeature]) -> RequestRows | None:
    """Return the runs of batch rows that have equal user features; None without user features."""
    inverses = {
        id(inverse): inverse
        for name in batch.user_features
        if (inverse := features[name].inverse) is not None
    }
    dense = batch.dense_features[:, list(batch.user_dense_columns)]
    columns = [*inverses.values(), *dense.unbind(1)]
    if not columns:
        return None
    first_rows, inverse = runs_of_equal_rows(columns)
    return RequestRows(inverse, first_rows, batch.user_features, batch.user_dense_columns)


def _longest(
    names: Sequence[str], features: Sequence[_StoredFeature], kjt: KeyedJaggedTensor | None
) -> dict[str, int]:
    """Return a dict from feature to its longest row's length; for a KJT on a GPU, an empty dict."""
    if kjt is None or not kjt.stride() or kjt.lengths().device.type != "cpu":
        return {}
    longest = kjt.lengths().view(len(names), -1).amax(1).tolist()
    return {
        name: bound
        if feature.segments is None
        else int(F.pad(feature.segments.lengths, (0, 1)).max())
        for name, feature, bound in zip(names, features, longest, strict=True)
    }


def _stored_features(batch: Batch) -> Iterable[tuple[str, _StoredFeature]]:
    """Yield name and stored rows of each feature that is not partially deduplicated."""
    if batch.kjt is not None:
        for key, jagged in batch.kjt.to_dict().items():
            yield key, _StoredFeature(jagged, batch.batch_size, None)
    for ikjt in batch.ikjts:
        yield from _split_ikjt(ikjt)


def _split_ikjt(ikjt: InverseKeyedJaggedTensor) -> Iterable[tuple[str, _StoredFeature]]:
    inverse = ikjt.inverse_lookup().long()
    for key, jagged in ikjt.to_unique_kjt().to_dict().items():
        yield key, _StoredFeature(jagged, ikjt.num_unique(), inverse)


def _exact(
    partials: Sequence[PartialInverseKeyedJaggedTensor], names: set[str]
) -> dict[str, _StoredFeature]:
    """Convert partially deduplicated features to exactly deduplicated features."""
    return {
        key: feature
        for partial in partials
        for ikjt in partial.to_ikjt([[key] for key in partial.keys() if key in names])  # noqa: SIM118
        for key, feature in _split_ikjt(ikjt)
    }


def _stored(
    partials: Sequence[PartialInverseKeyedJaggedTensor], names: set[str]
) -> Iterable[tuple[str, _StoredFeature]]:
    """Yield name and stored ids, as a single row, of each partially deduplicated feature."""
    for partial in partials:
        for key, values, offsets, lengths in partial.split():
            if key not in names:
                continue
            first_rows, inverse = runs_of_equal_rows([offsets, lengths])
            kept = lengths.index_select(0, first_rows)
            segments = Segments(offsets.index_select(0, first_rows), kept, int(kept.sum()))
            stored = JaggedTensor(values, lengths=lengths.new_tensor([values.numel()]))
            yield key, _StoredFeature(stored, first_rows.numel(), inverse, segments)


def _variable_batch_kjt(
    names: Sequence[str], features: Mapping[str, _StoredFeature], batch_size: int
) -> KeyedJaggedTensor | None:
    """Return a KJT with a row count per feature (VBE; plain if all are B); None without names."""
    chosen = [features[name] for name in names]
    if all(feature.inverse is None for feature in chosen):
        return plain_kjt(names, [feature.jagged for feature in chosen], batch_size)
    every_row = torch.arange(batch_size, device=chosen[0].jagged.values().device)
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.cat([feature.jagged.values() for feature in chosen]),
        lengths=torch.cat([feature.jagged.lengths() for feature in chosen]),
        weights=weights_of(names, [feature.jagged for feature in chosen]),
        stride_per_key_per_rank=[[feature.num_rows] for feature in chosen],
        # Passed in, since computing it would synchronize the device.
        length_per_key=[feature.jagged.values().numel() for feature in chosen],
        inverse_indices=(
            list(names),
            torch.stack(
                [every_row if feature.inverse is None else feature.inverse for feature in chosen]
            ),
        ),
    )
