"""Checks that ids are within table bounds, and that dense features are finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.arrow import place, shown
from recd_plugins.interfaces.batch import Batch
from recd_plugins.interfaces.rows import FeatureSchema, Rows
from recd_plugins.runtime.errors import DataError

_BLOCK = 1024


def check_ids(
    batch: Batch,
    num_embeddings: Mapping[str, int],
    rows: Rows,
    made_by: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise DataError for ids outside ``[0, num_embeddings)``. The batch must be on the CPU.

    ``made_by`` maps a feature to the preprocessing entry that produced its ids, for the message.
    """
    for key, values, row_of in _features(batch):
        if key not in num_embeddings:
            continue
        limit = num_embeddings[key]
        at = _first_outside(values, np.uint64(limit))
        if at >= 0:
            made = f" after {made_by[key]}" if key in made_by else ""
            raise DataError(
                f"{place(rows, key, row_of(at))}: the id is {values[at]}{made}, but the table of "
                f"this feature has rows 0 to {limit - 1}. Raise num_embeddings, or map the ids "
                "with a hash, a vocabulary or a sharding plugin for raw ids, which the baseline of "
                f"--compare does not use. Ids in this batch range from {int(values.min())} to "
                f"{int(values.max())}."
            )


def _features(batch: Batch) -> Iterator[tuple[str, NDArray[Any], Callable[[int], int]]]:
    """Yield each sparse feature's name, its ids, and a function from id index to batch row."""
    kjts: list[tuple[KeyedJaggedTensor, NDArray[Any] | None]] = []
    if batch.kjt is not None:
        kjts.append((batch.kjt, None))
    kjts += [(ikjt.to_unique_kjt(), ikjt.inverse_lookup().numpy()) for ikjt in batch.ikjts]
    for kjt, inverse in kjts:
        all_values, offsets, stride = kjt.values().numpy(), kjt.offsets().numpy(), kjt.stride()
        for index, key in enumerate(kjt.keys()):
            bounds = offsets[index * stride : (index + 1) * stride + 1]
            values = all_values[bounds[0] : bounds[-1]]
            yield key, values, partial(_row_in_bounds, bounds, inverse)
    for shared in batch.partials:
        for key, *tensors in shared.split():
            values, starts, lengths = (tensor.numpy() for tensor in tensors)
            yield key, values, partial(_row_in_segments, starts, starts + lengths)


def _row_in_bounds(bounds: NDArray[Any], inverse: NDArray[Any] | None, at: int) -> int:
    row = int(np.searchsorted(bounds, bounds[0] + at, "right")) - 1
    return row if inverse is None else int((inverse == row).argmax())


def _row_in_segments(starts: NDArray[Any], ends: NDArray[Any], at: int) -> int:
    return int(((starts <= at) & (at < ends)).argmax())


@numba.njit(cache=True, nogil=True)
def _first_outside(values: Any, limit: Any) -> Any:
    for first in range(0, len(values), _BLOCK):
        last = min(first + _BLOCK, len(values))
        outside = False
        for at in range(first, last):
            outside |= np.uint64(values[at]) >= limit
        if outside:
            for at in range(first, last):
                if np.uint64(values[at]) >= limit:
                    return at
    return -1


def all_finite(numbers: Tensor) -> bool:
    """Return whether all elements of a CPU tensor are finite."""
    # A sum over NaN or inf is never finite; a sum of large numbers may overflow too.
    return math.isfinite(numbers.sum()) or bool(numbers.isfinite().all())


def check_numbers(batch: Batch, schema: FeatureSchema, rows: Rows) -> None:
    """Raise DataError for dense features that are not finite, and for invalid labels."""
    dense = batch.dense_features.float()
    if not all_finite(dense):
        row, column = (~dense.isfinite()).nonzero()[0].tolist()
        name = schema.dense[column]
        raise DataError(
            f"{place(rows, name, row)}: the value is {shown(rows, name, row, dense[row, column])}, "
            "expected a finite float32 number. Fix or drop this row"
        )
    if schema.tasks:
        _check_task_labels(batch.labels, schema, rows)
        return
    inside = (batch.labels >= 0) & (batch.labels <= 1)  # NaN is not
    if not bool(inside.all()):
        row = int((~inside).int().argmax())
        value = shown(rows, schema.label, row, batch.labels[row])
        raise DataError(
            f"{place(rows, schema.label, row)}: the label is {value}, expected 0 or 1. Fix or drop "
            "this row"
        )


def _check_task_labels(labels: Tensor, schema: FeatureSchema, rows: Rows) -> None:
    """Raise DataError unless the labels ``[B, T]`` are missing (NaN) or valid."""
    if labels.shape != (len(rows), len(schema.tasks)):
        raise DataError(
            f"{rows.place_of(0)}: the labels of the batch have shape {tuple(labels.shape)}, but "
            f"the dataset has {len(schema.tasks)} labels. Use labels(rows, schema) of "
            "recd_plugins.api.arrow in the converter"
        )
    for column, task in zip(labels.unbind(1), schema.tasks, strict=True):
        wrong = task.wrong(column)
        if bool(wrong.any()):
            row = int(wrong.int().argmax())
            value = shown(rows, task.name, row, column[row])
            raise DataError(
                f"{place(rows, task.name, row)}: the label is {value}, expected "
                f"{task.valid_labels}. Fix or drop this row"
            )
