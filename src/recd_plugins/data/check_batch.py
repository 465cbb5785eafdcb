"""What readers and converters return, looked at before it is used: shapes, types and names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Converter, Dataset, FeatureSchema, Rows
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
from recd_plugins.values.batch import Batch


def check_rows(dataset: Dataset, rows: Any, batch_size: int) -> None:
    """Refuse what is no batch of ``batch_size`` rows.

    Raises:
        PluginError: names the dataset, what it yielded and what it should.
    """
    if not isinstance(rows, Rows):
        raise PluginError(
            f"{dataset.title}: its reader yielded {type(rows).__name__}, "
            "which is no recd_plugins.api.Rows"
        )
    if len(rows) != batch_size:
        raise PluginError(
            f"{dataset.title}: its reader yielded a batch of {len(rows)} rows; training.batch_size "
            f"is {batch_size}, and every batch has exactly so many: leave out rows that do not "
            "fill one"
        )


def check_batch(converter: Converter, batch: Any, num_rows: int, schema: FeatureSchema) -> None:
    """Refuse what is no batch of ``num_rows`` rows with each feature of ``schema`` once.

    Raises:
        PluginError: names the converter, the feature, what it returned and what it should.
    """
    if not isinstance(batch, Batch):
        raise PluginError(
            f"{converter.title}: convert returned {type(batch).__name__}, "
            "which is no recd_plugins.values.batch.Batch"
        )
    shape = num_rows, len(schema.dense)
    _check(converter, "dense_features", batch.dense_features, shape, torch.float64)
    _check(converter, "labels", batch.labels, (num_rows,))
    features: list[str] = []
    plain = () if batch.kjt is None else (batch.kjt,)
    if any(kjt.variable_stride_per_key() for kjt in plain):
        raise PluginError(
            f"{converter.title} returned a kjt with a variable batch per feature; kjt has every "
            "row of each feature, and features over unique rows stand in ikjts"
        )
    for sparse in (*plain, *batch.ikjts, *batch.partials):
        keys = sparse.keys()
        if sparse.stride() != num_rows:
            raise PluginError(
                f"{converter.title} returned {sparse.stride()} rows of {', '.join(keys)} for "
                f"{num_rows} rows"
            )
        if sparse.values().dtype != torch.int64:
            raise PluginError(
                f"{converter.title} returned ids of {', '.join(keys)} as {sparse.values().dtype}; "
                "ids are torch.int64"
            )
        if not isinstance(sparse, PartialInverseKeyedJaggedTensor):
            _check_lengths(converter, sparse)
        features += keys
    for partial in batch.partials:
        _check_stretches(converter, partial)
    _check_names(converter, features, schema)


def _check_lengths(
    converter: Converter, sparse: KeyedJaggedTensor | InverseKeyedJaggedTensor
) -> None:
    lengths, num_ids = sparse.lengths(), sparse.values().numel()
    if (lengths < 0).any() or int(lengths.sum()) != num_ids:
        raise PluginError(
            f"{converter.title} returned {num_ids} ids of {', '.join(sparse.keys())} whose lengths "
            f"are {int(lengths.min())} to {int(lengths.max())} and add up to {int(lengths.sum())}"
        )


def _check(
    converter: Converter, name: str, tensor: Tensor, shape: tuple[int, ...], *wider: torch.dtype
) -> None:
    dtypes = (torch.float32, *wider)
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        raise PluginError(
            f"{converter.title} returned {name} as {tensor.dtype} {list(tensor.shape)}; expected "
            f"{' or '.join(map(str, dtypes))} {list(shape)}"
        )
    if tensor.requires_grad:
        raise PluginError(f"{converter.title} returned {name} that require a gradient: detach them")


def _check_stretches(converter: Converter, partial: PartialInverseKeyedJaggedTensor) -> None:
    for key, values, offsets, lengths in partial.split():
        wrong = (offsets < 0) | (lengths < 0) | (offsets + lengths > values.numel())
        if wrong.any():
            row = int(wrong.int().argmax())
            raise PluginError(
                f"{converter.title} returned row {row} of {key} as {int(lengths[row])} ids from "
                f"{int(offsets[row])} on; {values.numel()} are stored"
            )


def _check_names(converter: Converter, features: list[str], schema: FeatureSchema) -> None:
    if sorted(features) == sorted(schema.sparse):
        return
    expected, found = set(schema.sparse), Counter(features)
    faults = {
        "left out": [name for name in schema.sparse if name not in found],
        "returned more than once": [name for name in found if found[name] > 1],
        "made up": [name for name in found if name not in expected],
    }
    verb, names = next((verb, names) for verb, names in faults.items() if names)
    raise PluginError(
        f"{converter.title} {verb} feature{'s' if len(names) > 1 else ''} {', '.join(names)}; each "
        "sparse feature of the schema stands in a batch once"
    )
