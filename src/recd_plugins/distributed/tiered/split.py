"""Which tier each id of a batch goes to, and how the embeddings come back in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.tiered.tiers import RowTiers

_COLD = -1


@dataclass(frozen=True, eq=False)
class Split:
    """The ids of one batch by tier. ``n`` is the number of ids of features of tiered tables.

    Attributes:
        index: that made it.
        cold: all features; of tiered tables only the ids that have no copy.
        hot: positions in the hot overlay, ``[num_hot]`` int64.
        flex: positions in the flex overlays of their owners, ``[num_flex]`` int64, by owner, then
            by feature.
        flex_sizes: how many of them, ``[ranks_per_node, F]`` int64.
        source: which of the n ids each is, of the cold, the hot and the flex ones, ``[n]`` int64.
        place: where each of the n ids is among them, ``[n]`` int64; the inverse of ``source``.
        ids: the n ids, ``[n]``.
        lengths: of the tiered features, ``[F, stride]``.
        ids_per_feature: of the tiered features.
    """

    index: TierIndex
    cold: KeyedJaggedTensor
    hot: Tensor
    flex: Tensor
    flex_sizes: Tensor
    source: Tensor
    place: Tensor
    ids: Tensor
    lengths: Tensor
    ids_per_feature: list[int]

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until ``stream`` is done with it."""
        for tensor in (self.hot, self.flex, self.flex_sizes, self.source, self.place, self.ids):
            tensor.record_stream(stream)
        self.lengths.record_stream(stream)


@dataclass(eq=False)
class TierIndex:
    """Finds ids among the chosen rows, by a search in those rows sorted.

    Its memory is that of the chosen rows, not of the tables.

    Args:
        configs: all tables of a collection.
        tiers: of the tiered ones.
        ranks_per_node: that deal the flex rows out: the one at place p of all of them is at
            position ``p // ranks_per_node`` of the node's rank ``p % ranks_per_node``.
        device: of the ids.
    """

    configs: Sequence[EmbeddingConfig]
    tiers: Mapping[str, RowTiers]
    ranks_per_node: int
    device: torch.device
    num_hot: int = field(init=False)
    num_flex: int = field(init=False)

    def __post_init__(self) -> None:
        tiered = [config for config in self.configs if config.name in self.tiers]
        self.features = [name for config in tiered for name in config.feature_names]
        self._others = [
            name
            for config in self.configs
            if config.name not in self.tiers
            for name in config.feature_names
        ]
        self.num_hot = sum(len(rows.hot) for rows in self.tiers.values())
        self.num_flex = sum(len(rows.flex) for rows in self.tiers.values())
        # Rows of all tables are told apart as if the tables stood one below the other.
        sizes = np.array([config.num_embeddings for config in tiered], dtype=np.int64)
        first = np.cumsum(sizes) - sizes
        chosen = [self.tiers[config.name] for config in tiered]
        rows = np.concatenate(
            [start + tiers.hot for start, tiers in zip(first, chosen, strict=True)]
            + [start + tiers.flex for start, tiers in zip(first, chosen, strict=True)]
        )
        order = np.argsort(rows)
        # An id beyond all of them is compared with the last one.
        beyond = np.array([np.iinfo(np.int64).max])
        self._sorted = self._tensor(np.concatenate([rows[order], beyond]))
        self._places = self._tensor(np.concatenate([order, [_COLD]]))
        num_features = [len(config.feature_names) for config in tiered]
        self._first_row = self._tensor(np.repeat(first, num_features))
        self._num_rows = self._tensor(np.repeat(sizes, num_features))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)

    def hot_rows(self) -> dict[str, Tensor]:
        """Rows in the hot overlay by table, in the order of its positions."""
        return {name: self._tensor(rows.hot) for name, rows in self.tiers.items()}

    def flex_rows(self, local_rank: int) -> dict[str, Tensor]:
        """Rows in the flex overlay of a node's rank by table, in the order of its positions."""
        rows, start = {}, 0
        for name, tiers in self.tiers.items():
            first = (local_rank - start) % self.ranks_per_node
            rows[name] = self._tensor(tiers.flex[first :: self.ranks_per_node])
            start += len(tiers.flex)
        return rows

    def split(self, features: KeyedJaggedTensor) -> Split:
        """Divide a batch. Other features than those of the tables are left out."""
        numbers = {name: number for number, name in enumerate(features.keys())}
        wanted = [numbers[name] for name in self.features]
        per_key, stride = features.length_per_key(), features.stride()
        all_lengths = features.lengths().view(len(numbers), stride)
        ids = _take(features, wanted)
        lengths = all_lengths if wanted == list(range(len(numbers))) else all_lengths[wanted]
        per_feature = [per_key[number] for number in wanted]

        feature = torch.repeat_interleave(
            torch.arange(len(wanted), device=ids.device),
            torch.tensor(per_feature, device=ids.device),
            output_size=len(ids),
        )
        place = self._find(ids, feature)
        is_cold = place < 0
        parts = [is_cold.nonzero().squeeze(1)]
        hot = flex = place[:0]
        flex_sizes = place.new_zeros(self.ranks_per_node, len(wanted))
        if self.num_hot:
            parts.append(((place >= 0) & (place < self.num_hot)).nonzero().squeeze(1))
            hot = place.index_select(0, parts[-1])
        if self.num_flex:
            at = (place >= self.num_hot).nonzero().squeeze(1)
            flex = place.index_select(0, at) - self.num_hot
            owner = flex % self.ranks_per_node
            part = owner * len(wanted) + feature.index_select(0, at)
            part, order = torch.sort(part, stable=True)
            parts.append(at.index_select(0, order))
            flex = (flex // self.ranks_per_node).index_select(0, order)
            flex_sizes = torch.bincount(part, minlength=flex_sizes.numel()).view_as(flex_sizes)
        source = torch.cat(parts)
        inverse = torch.empty_like(source)
        inverse[source] = torch.arange(len(source), device=source.device)

        ends = torch.cat([is_cold.new_zeros(1, dtype=torch.int64), is_cold.cumsum(0)])
        offsets = torch.cat([ends[:1], lengths.flatten().cumsum(0)])
        cold_lengths = ends.index_select(0, offsets).diff().to(lengths.dtype)
        others = [numbers[name] for name in self._others]
        cold_ids = ids.index_select(0, parts[0])
        if others:
            cold_ids = torch.cat([cold_ids, _take(features, others)])
            cold_lengths = torch.cat([cold_lengths, all_lengths[others].flatten()])
        cold = KeyedJaggedTensor(
            keys=self.features + self._others,
            values=cold_ids,
            lengths=cold_lengths,
            stride=stride,
        )
        return Split(self, cold, hot, flex, flex_sizes, source, inverse, ids, lengths, per_feature)

    def _find(self, ids: Tensor, feature: Tensor) -> Tensor:
        """Place among the hot rows, or behind those among the flex rows, or ``_COLD``."""
        keys = ids + self._first_row.index_select(0, feature)
        at = torch.searchsorted(self._sorted, keys)
        found = self._sorted.index_select(0, at) == keys
        # An id that is out of its table is no row of the next one.
        found &= (ids >= 0) & (ids < self._num_rows.index_select(0, feature))
        return torch.where(found, self._places.index_select(0, at), _COLD)


def _take(features: KeyedJaggedTensor, numbers: list[int]) -> Tensor:
    """Values of some keys, one key after the other."""
    values, offsets = features.values(), features.offset_per_key()
    if numbers == list(range(len(offsets) - 1)):
        return values
    return torch.cat([values[offsets[number] : offsets[number + 1]] for number in numbers])
