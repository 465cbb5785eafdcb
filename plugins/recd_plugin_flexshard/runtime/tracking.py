"""What TorchRec's hook for trackers of lookups is told about the tiers.

Its base class tells the hook what the sharded tables look up: features and embeddings. These are
the same for the copies, with the tables' own ids.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime.flex import FlexSizes
from recd_plugin_flexshard.runtime.overlay import Overlay
from recd_plugin_flexshard.runtime.split import TierSplit, feature_of


def hot_lookup(split: TierSplit, overlay: Overlay) -> tuple[KeyedJaggedTensor, Tensor]:
    """Ids of this rank's batch that are hot, as one row a feature, and their embeddings."""
    feature = feature_of(split.hot_source, split.ids_per_feature)
    return _lookup(split.index.features, feature, split.hot, overlay)


def flex_lookup(
    features: list[str], positions: Tensor, sizes: FlexSizes, overlay: Overlay
) -> tuple[KeyedJaggedTensor, Tensor]:
    """Ids of the node's batches that are flex rows of this rank, and their embeddings.

    Args:
        features: of tiered tables.
        positions: in the overlay, by rank of the node, then by feature.
        sizes: how many of each.
        overlay: of this rank.
    """
    counts = torch.tensor(sizes.received, device=positions.device)
    numbers = torch.arange(len(features), device=positions.device).repeat(len(counts))
    feature = numbers.repeat_interleave(counts.flatten(), output_size=len(positions))
    return _lookup(features, feature, positions, overlay)


def _lookup(
    features: list[str], feature: Tensor, positions: Tensor, overlay: Overlay
) -> tuple[KeyedJaggedTensor, Tensor]:
    feature, order = torch.sort(feature, stable=True)
    positions = positions.index_select(0, order)
    rows = torch.cat(list(overlay.rows.values()))
    kjt = KeyedJaggedTensor(
        keys=features,
        values=rows.index_select(0, positions),
        lengths=torch.bincount(feature, minlength=len(features)),
    )
    return kjt, overlay.weights.index_select(0, positions)
