"""Fixes mean pooling of row-wise sharded tables.

Each rank has only some rows of a bag, so TorchRec sums them, and later divides the sums by the bag
lengths in a callback of the EmbeddingBagCollection. In torchrec 1.6 to 1.9 the callback silently
computes wrong results:

- It also divides features of tables with other sharding types, whose kernels return means.
- If several tables look up a feature, it skips the division for the first table only.
- For variable batches (VBE), it may use the inverse indices of another feature.
- It adds 1e-6 to every length, and also to the divisor 1 of features without division.

``RowWiseDivisor`` replaces the callback. It also does not wait for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.sharding.coalesced.input_dist import numbers_on, refuse_at_signs
from recd_plugins.sparse.jagged import with_fields

_DIVIDED_AFTERWARDS = {ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value}


def mean_pooled(module: EmbeddingBagCollection | FusedEmbeddingBagCollection) -> list[str]:
    """Return the names of the tables with mean pooling."""
    return [c.name for c in module.embedding_bag_configs() if c.pooling == PoolingType.MEAN]


def refuse_weighted_mean(tables: Sequence[str]) -> None:
    """Raise ExactnessError if ``tables``, which have mean pooling and weighted ids, is not empty.

    FBGEMM's kernels (1.6 to 1.9) divide by the number of ids in the forward pass, but not in the
    backward pass. For row-wise tables TorchRec divides by the sum of the weights.
    """
    if tables:
        raise ExactnessError(
            f"tables {', '.join(map(repr, tables))} use mean pooling with weighted ids, for which "
            "FBGEMM computes wrong gradients. Use sum pooling with normalised weights, or remove "
            "the weights."
        )


def refuse_means_in_grids(
    tables: Sequence[str], shardings: Mapping[str, ParameterSharding]
) -> None:
    """Raise ExactnessError for mean pooling of grid-sharded tables, which TorchRec only sums."""
    grids = [t for t in tables if shardings[t].sharding_type == ShardingType.GRID_SHARD.value]
    if grids:
        raise ExactnessError(
            f"tables {', '.join(map(repr, grids))} use mean pooling with grid_shard sharding, for "
            "which TorchRec returns sums. Shard these tables another way, or use sum pooling."
        )


def divide_row_wise_tables_only(
    sharded: ShardedEmbeddingBagCollection,
    configs: list[EmbeddingBagConfig],
    shardings: Mapping[str, ParameterSharding],
) -> RowWiseDivisor | None:
    """Disable TorchRec's division of sums by lengths, and return its replacement.

    Returns None if no table is both row-wise and mean-pooled.

    Raises:
        ExactnessError: a feature looks up two tables, and only the sums of one are divided.
        SetupError: a feature name contains "@".
    """
    divided: set[str] = set()
    whole: set[str] = set()
    for config in configs:
        row_wise = shardings[config.name].sharding_type in _DIVIDED_AFTERWARDS
        mean = config.pooling == PoolingType.MEAN
        (divided if row_wise and mean else whole).update(config.feature_names)
    if not divided:
        return None
    refuse_at_signs(divided | whole, "row-wise tables of the module have mean pooling")
    if both := sorted(divided & whole):
        raise ExactnessError(
            f"features {', '.join(map(repr, both))} look up a row-wise table with mean pooling and "
            "a different table in one EmbeddingBagCollection, so TorchRec would divide wrongly. "
            "Use the same pooling and sharding for both tables, or put them into separate "
            "EmbeddingBagCollections."
        )
    return RowWiseDivisor(sharded, divided)


class RowWiseDivisor:
    """Counts the ids per bag, by which sums of row-wise tables with mean pooling are divided."""

    def __init__(self, sharded: ShardedEmbeddingBagCollection, divided: Container[str]) -> None:
        sharded._has_mean_pooling_callback = False
        features = [name.partition("@")[0] for name in sharded._embedding_names]
        self._features = [
            feature
            for feature, dim in zip(features, sharded._embedding_dims, strict=True)
            for _ in range(dim)
        ]
        self._divided, self._keys = divided, list[str]()

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Return divisors, float32 ``[B, columns]``: bag lengths, or 1 if empty or undivided."""
        keys, lengths, device = features.keys(), features.lengths(), features.device()
        if keys != self._keys:
            place = {key: row for row, key in enumerate(keys)}
            columns = [place[feature] for feature in self._features]
            self._keys, self._columns = list(keys), numbers_on(device, columns)[0]
            most = [math.inf if key in self._divided else 1.0 for key in keys]
            bounds = torch.tensor([[1.0] * len(most), most])
            self._least, self._most = bounds.unsqueeze(2).to(device)
        if features.variable_stride_per_key():
            _, indices = with_inverse_indices_of(features, keys).inverse_indices()
            first = [0, *accumulate(features.stride_per_key())][:-1]
            rows = indices + numbers_on(device, first)[0].unsqueeze(1)
            lengths = lengths.index_select(0, rows.flatten())
        by_key = lengths.view(len(keys), lengths.numel() // len(keys))
        return by_key.clamp(self._least, self._most).T.index_select(1, self._columns)

    @staticmethod
    def divide(sums: KeyedTensor, divisor: Tensor) -> KeyedTensor:
        return KeyedTensor(sums.keys(), sums.length_per_key(), sums.values() / divisor)


def with_inverse_indices_of(features: KeyedJaggedTensor, order: Sequence[str]) -> KeyedJaggedTensor:
    """Return ``features`` with its inverse indices in the feature order ``order``."""
    names, indices = features.inverse_indices()
    if list(order) == names:
        return features
    place = {name: row for row, name in enumerate(names)}
    rows = numbers_on(indices.device, [place[name] for name in order])[0]
    return with_fields(features, inverse_indices=(list(order), indices.index_select(0, rows)))
