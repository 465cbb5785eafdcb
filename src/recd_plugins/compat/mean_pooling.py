"""Fixes mean pooling of row-wise sharded tables.

Each rank has only some rows of a bag, so TorchRec sums them, and later divides the sums by the bag
lengths in a callback of the EmbeddingBagCollection. In torchrec 1.6 to 1.9 the callback silently
computes wrong results:

- It also divides features of tables with other sharding types, whose kernels return means.
- If several tables look up a feature, it skips the division for the first table only.
- For variable batches (VBE), it may use the inverse indices of another feature.
- It adds 1e-6 to every length, and also to the divisor 1 of features without division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.sharding.coalesced.input_dist import refuse_at_signs
from recd_plugins.sparse.deduplicated_kjt import with_fields

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
) -> Tensor | None:
    """Return a mask of the output columns whose sums must be divided, bool ``[columns]``.

    Returns None if no table is both row-wise and mean-pooled.

    Raises:
        ExactnessError: a feature looks up one table whose sums must be divided and another table.
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
    sharded._pooling_type_to_rs_features[PoolingType.SUM.value] = sorted(whole)
    names, dims = sharded._embedding_names, sharded._embedding_dims
    is_divided = torch.tensor([name.partition("@")[0] in divided for name in names])
    return is_divided.repeat_interleave(torch.tensor(dims)).to(sharded._device)


def align_inverse_indices(
    sharded: ShardedEmbeddingBagCollection, features: KeyedJaggedTensor
) -> KeyedJaggedTensor:
    """Reorder the inverse indices of a batch to the order of features that TorchRec uses."""
    order = [name for sharding in sharded._embedding_shardings for name in sharding.feature_names()]
    # If a feature has several shardings, TorchRec finds its indices by name.
    if len(order) != len(features.inverse_indices()[0]):
        return features
    return with_inverse_indices_of(features, order)


def with_inverse_indices_of(features: KeyedJaggedTensor, order: Sequence[str]) -> KeyedJaggedTensor:
    """Return ``features`` with its inverse indices in the feature order ``order``."""
    names, indices = features.inverse_indices()
    if list(order) == names:
        return features
    place = {name: row for row, name in enumerate(names)}
    rows = torch.tensor([place[name] for name in order], device=indices.device)
    return with_fields(features, inverse_indices=(list(order), indices.index_select(0, rows)))


def exact_divisor(divisor: Tensor, is_divided: Tensor) -> Tensor:
    """Remove TorchRec's 1e-6 from a divisor ``[B, columns]`` of mean pooling.

    The divisor is 1 for empty bags and for columns where ``is_divided`` is False.
    """
    return torch.where(is_divided, divisor.round().clamp(min=1), 1.0)
