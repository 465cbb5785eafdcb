"""Numbers that are not finite: found in one pass, named with the file and row they came from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recd_plugins.data.arrow import place, shown
from recd_plugins.errors import DataError
from recd_plugins.interfaces import FeatureSchema, Rows
from recd_plugins.sparse import InverseKeyedJaggedTensor
from recd_plugins.values.batch import Batch


def all_finite(numbers: Tensor) -> bool:
    """Whether no number is NaN or infinite; of any shape, in CPU memory."""
    # A sum over NaN or inf is not finite; that of large numbers need not be either.
    return math.isfinite(numbers.sum()) or bool(numbers.isfinite().all())


def check_numbers(batch: Batch, schema: FeatureSchema, rows: Rows) -> None:
    """Refuse dense features and weights that are not finite, and labels outside 0 to 1.

    Args:
        batch: what a converter made of ``rows``, in CPU memory.
        schema: names of its dense features and of its label.
        rows: where the batch came from.

    Raises:
        DataError: says file, row, column and value.
    """
    dense = batch.dense_features.float()
    if not all_finite(dense):
        row, column = (~dense.isfinite()).nonzero()[0].tolist()
        name = schema.dense[column]
        raise DataError(
            f"{place(rows, name, row)}: the value is {shown(rows, name, row, dense[row, column])}; "
            "dense features are finite numbers of 32 bits (up to 3.4e38): write another value, or "
            "leave the row out"
        )
    inside = (batch.labels >= 0) & (batch.labels <= 1)  # NaN is not
    if not bool(inside.all()):
        row = int((~inside).int().argmax())
        value = shown(rows, schema.label, row, batch.labels[row])
        raise DataError(f"{place(rows, schema.label, row)}: the label is {value}, expected 0 or 1")
    if batch.kjt is not None and (weights := batch.kjt.weights_or_none()) is not None:
        _check_weights(weights, batch.kjt.lengths(), batch.kjt.keys(), None, rows)
    for ikjt in batch.ikjts:
        if (weights := ikjt.weights_or_none()) is not None:
            _check_weights(weights, ikjt.lengths(), ikjt.keys(), ikjt, rows)


def _check_weights(
    weights: Tensor,
    lengths: Tensor,
    keys: list[str],
    ikjt: InverseKeyedJaggedTensor | None,
    rows: Rows,
) -> None:
    if all_finite(weights):
        return
    at = int((~weights.isfinite()).int().argmax())
    bag = int(torch.searchsorted(lengths.cumsum(0), at, right=True))
    feature, row = divmod(bag, len(lengths) // len(keys))
    if ikjt is not None:
        row = int((ikjt.inverse_lookup() == row).int().argmax())
    raise DataError(
        f"{place(rows, keys[feature], row)}: an id has the weight {float(weights[at])}; weights "
        "are finite numbers"
    )
