"""Mean pooling of row-wise tables.

Each rank has a part of a bag's rows, so TorchRec sums them and divides by the bag's length in one
callback over all features of the EmbeddingBagCollection. In torchrec 1.6 to 1.9 that callback goes
wrong, silently, in four ways:

- features of tables that are sharded otherwise are divided too, although their kernels have pooled;
- a feature that several tables look up counts as not to be divided for the first of them only;
- with a variable batch (VBE) and features that TorchRec reorders by sharding, the lengths are
  expanded by the inverse indices of another feature;
- 1e-6 is added to every length, and to the 1 of features that are not to be divided.
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
    """Return names of the tables with mean pooling."""
    return [c.name for c in module.embedding_bag_configs() if c.pooling == PoolingType.MEAN]


def refuse_weighted_mean(tables: Sequence[str]) -> None:
    """Raise ExactnessError if ``tables`` is not empty: weighted ids with mean pooling.

    FBGEMM's kernels (1.6 to 1.9) divide by the number of ids in the forward pass, but not in the
    backward pass. For row-wise tables TorchRec divides by the sum of the weights.
    """
    if tables:
        raise ExactnessError(
            f"tables {', '.join(tables)} use mean pooling with weighted ids, for which FBGEMM "
            "computes wrong gradients. Use sum pooling with normalised weights, or remove the "
            "weights."
        )


def refuse_means_in_grids(
    tables: Sequence[str], shardings: Mapping[str, ParameterSharding]
) -> None:
    """Refuse mean pooling of grid-sharded tables: nothing divides the sums of their kernels."""
    grids = [t for t in tables if shardings[t].sharding_type == ShardingType.GRID_SHARD.value]
    if grids:
        raise ExactnessError(
            f"tables {', '.join(grids)} use mean pooling with grid_shard sharding, for which "
            "TorchRec returns sums. Shard these tables another way, or use sum pooling."
        )


def divide_row_wise_tables_only(
    sharded: ShardedEmbeddingBagCollection,
    configs: list[EmbeddingBagConfig],
    shardings: Mapping[str, ParameterSharding],
) -> Tensor | None:
    """Return which output columns to divide, bool ``[columns]``; None if there is no callback.

    Raises:
        ExactnessError: a feature looks up a table that is divided and one that is not; the callback
            knows features, not tables.
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
            f"features {', '.join(both)} look up a row-wise table with mean pooling and a "
            "different table in one EmbeddingBagCollection, so TorchRec would divide wrongly. Use "
            "the same pooling and sharding for both tables, or put each table into its own "
            "EmbeddingBagCollection."
        )
    sharded._pooling_type_to_rs_features[PoolingType.SUM.value] = sorted(whole)
    names, dims = sharded._embedding_names, sharded._embedding_dims
    is_divided = torch.tensor([name.partition("@")[0] in divided for name in names])
    return is_divided.repeat_interleave(torch.tensor(dims)).to(sharded._device)


def align_inverse_indices(
    sharded: ShardedEmbeddingBagCollection, features: KeyedJaggedTensor
) -> KeyedJaggedTensor:
    """Reorder the inverse indices to the key order that TorchRec will use."""
    order = [name for sharding in sharded._embedding_shardings for name in sharding.feature_names()]
    # If a feature has several shardings, TorchRec finds its indices by name.
    if len(order) != len(features.inverse_indices()[0]):
        return features
    return with_inverse_indices_of(features, order)


def with_inverse_indices_of(features: KeyedJaggedTensor, order: Sequence[str]) -> KeyedJaggedTensor:
    """Return ``features`` with its inverse indices reordered."""
    names, indices = features.inverse_indices()
    if list(order) == names:
        return features
    place = {name: row for row, name in enumerate(names)}
    rows = torch.tensor([place[name] for name in order], device=indices.device)
    return with_fields(features, inverse_indices=(list(order), indices.index_select(0, rows)))


def exact_divisor(divisor: Tensor, is_divided: Tensor) -> Tensor:
    """Return the mean pooling divisor ``[B, columns]`` without TorchRec's 1e-6; 1 if empty."""
    return torch.where(is_divided, divisor.round().clamp(min=1), 1.0)
