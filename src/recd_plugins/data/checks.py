"""Checks for ids outside their table and for numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.arrow import place, shown
from recd_plugins.interfaces.batch import Batch
from recd_plugins.interfaces.rows import FeatureSchema, Rows
from recd_plugins.runtime.errors import DataError
from recd_plugins.sparse import InverseKeyedJaggedTensor

_BLOCK = 1024


def check_ids(
    batch: Batch,
    num_embeddings: Mapping[str, int],
    rows: Rows,
    made_by: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuse ids outside their table. The batch must be on the CPU."""
    if batch.kjt is not None:
        _check_kjt(batch.kjt, None, num_embeddings, rows, made_by)
    for ikjt in batch.ikjts:
        _check_kjt(ikjt.to_unique_kjt(), ikjt, num_embeddings, rows, made_by)
    for partial in batch.partials:
        for key, *tensors in partial.split():
            if key not in num_embeddings:
                continue
            values, offsets, lengths = (tensor.numpy() for tensor in tensors)
            limit = num_embeddings[key]
            at = _first_outside(values, np.int64(0), np.int64(len(values)), np.uint64(limit))
            if at >= 0:
                row = int(((offsets <= at) & (at < offsets + lengths)).argmax())
                raise _outside(rows, key, row, values[at], values, limit, made_by.get(key))


def _check_kjt(
    kjt: KeyedJaggedTensor,
    ikjt: InverseKeyedJaggedTensor | None,
    num_embeddings: Mapping[str, int],
    rows: Rows,
    made_by: Mapping[str, str],
) -> None:
    values, offsets, stride = kjt.values().numpy(), kjt.offsets().numpy(), kjt.stride()
    for index, key in enumerate(kjt.keys()):
        if key not in num_embeddings:
            continue
        row_offsets = offsets[index * stride : (index + 1) * stride + 1]
        limit = num_embeddings[key]
        at = _first_outside(values, row_offsets[0], row_offsets[-1], np.uint64(limit))
        if at < 0:
            continue
        row = int(np.searchsorted(row_offsets, at, "right")) - 1
        if ikjt is not None:
            row = int((ikjt.inverse_lookup().numpy() == row).argmax())
        used = values[row_offsets[0] : row_offsets[-1]]
        raise _outside(rows, key, row, values[at], used, limit, made_by.get(key))


def _outside(
    rows: Rows,
    key: str,
    row: int,
    value: int,
    used: NDArray[Any],
    limit: int,
    maker: str | None,
) -> DataError:
    made = "" if maker is None else f", as {maker} leaves it"
    return DataError(
        f"{place(rows, key, row)}: the id is {value}{made}, and the table of this feature has "
        f"{limit} rows, 0 to {limit - 1}; ids in this batch go from {int(used.min())} to "
        f"{int(used.max())}: raise num_embeddings, or preprocess ids with a hash or a vocabulary"
    )


@numba.njit(cache=True, nogil=True)
def _first_outside(values: Any, start: Any, end: Any, limit: Any) -> Any:
    """Return the place of the first value outside [0, limit), or -1."""
    for first in range(start, end, _BLOCK):
        last = min(first + _BLOCK, end)
        outside = False
        for at in range(first, last):
            outside |= np.uint64(values[at]) >= limit
        if outside:
            for at in range(first, last):
                if np.uint64(values[at]) >= limit:
                    return at
    return -1


def all_finite(numbers: Tensor) -> bool:
    """Return whether all numbers of a CPU tensor are finite."""
    # A sum over NaN or inf is never finite; a sum of large numbers may overflow too.
    return math.isfinite(numbers.sum()) or bool(numbers.isfinite().all())


def check_numbers(batch: Batch, schema: FeatureSchema, rows: Rows) -> None:
    """Refuse dense features and weights that are not finite, and labels outside 0 to 1."""
    dense = batch.dense_features.float()
    if not all_finite(dense):
        row, column = (~dense.isfinite()).nonzero()[0].tolist()
        name = schema.dense[column]
        raise DataError(
            f"{place(rows, name, row)}: the value is {shown(rows, name, row, dense[row, column])}; "
            "write a finite float32 number, or leave the row out"
        )
    inside = (batch.labels >= 0) & (batch.labels <= 1)  # NaN is not
    if not bool(inside.all()):
        row = int((~inside).int().argmax())
        value = shown(rows, schema.label, row, batch.labels[row])
        raise DataError(f"{place(rows, schema.label, row)}: the label is {value}, expected 0 or 1")
    for features in (*(() if batch.kjt is None else (batch.kjt,)), *batch.ikjts):
        weights = features.weights_or_none()
        if weights is None or all_finite(weights):
            continue
        keys, lengths = features.keys(), features.lengths()
        at = int((~weights.isfinite()).int().argmax())
        bag = int(torch.searchsorted(lengths.cumsum(0), at, right=True))
        feature, row = divmod(bag, len(lengths) // len(keys))
        if isinstance(features, InverseKeyedJaggedTensor):
            row = int((features.inverse_lookup() == row).int().argmax())
        raise DataError(
            f"{place(rows, keys[feature], row)}: an id has the weight {float(weights[at])}; "
            "weights are finite numbers"
        )
