"""Which tier each id of a batch goes to, and how the embeddings come back in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime.places import Places
from recd_plugin_flexshard.runtime.tiers import RowTiers


@dataclass(frozen=True, eq=False)
class TierSplit:
    """The ids of one batch by tier. ``n`` is the number of ids of features of tiered tables.

    Attributes:
        index: that made it.
        cold: all features; of tiered tables only the ids that have no copy.
        hot: positions in the hot overlay, ``[num_hot]`` int64.
        flex: positions in the flex overlays of their owners, ``[num_flex]`` int64, by owner, then
            by feature.
        flex_sizes: how many of them, ``[ranks_per_node, F]`` int64.
        cold_source: which of the n ids each cold one of them is, int64.
        hot_source: which of them each of ``hot`` is, ``[num_hot]`` int64.
        flex_source: which of them each of ``flex`` is, ``[num_flex]`` int64.
        ids: the n ids, ``[n]``.
        lengths: of the tiered features, ``[F, stride]``.
        ids_per_feature: of the tiered features.
    """

    index: TierIndex
    cold: KeyedJaggedTensor
    hot: Tensor
    flex: Tensor
    flex_sizes: Tensor
    cold_source: Tensor
    hot_source: Tensor
    flex_source: Tensor
    ids: Tensor
    lengths: Tensor
    ids_per_feature: list[int]

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until ``stream`` is done with it."""
        for tensor in (
            self.hot,
            self.flex,
            self.flex_sizes,
            self.cold_source,
            self.hot_source,
            self.flex_source,
            self.ids,
            self.lengths,
        ):
            tensor.record_stream(stream)


@dataclass(eq=False)
class TierIndex:
    """Finds ids among the chosen rows.

    Its memory is that of the chosen rows, not of the tables. A row's key is its place as if the
    tiered tables stood one below the other.

    Args:
        configs: all tables of a collection.
        tiers: of the tiered ones, in the order of ``configs``.
        ranks_per_node: that deal the flex rows out: the one at place p of all of them is at
            position ``p // ranks_per_node`` of the node's rank ``p % ranks_per_node``.
        num_ranks: that hold the tables' shards.
        device: of the ids.

    Attributes:
        features: of tiered tables, table by table.
        first_keys: key of the first row of each tiered table, ``[num_tables]`` int64.
        places: of the keys of hot rows, and behind them of flex rows.
        num_hot: hot rows of all tables.
        num_flex: flex rows of all tables.
    """

    configs: Sequence[EmbeddingConfig]
    tiers: Mapping[str, RowTiers]
    ranks_per_node: int
    num_ranks: int
    device: torch.device
    features: list[str] = field(init=False)
    first_keys: NDArray[np.int64] = field(init=False)
    places: Places = field(init=False)
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
        sizes = np.array([config.num_embeddings for config in tiered], dtype=np.int64)
        self.first_keys = np.cumsum(sizes) - sizes
        self.places = Places(np.concatenate(self.chosen_keys()), self.device)
        num_features = [len(config.feature_names) for config in tiered]
        self._first_key = self._tensor(np.repeat(self.first_keys, num_features))
        self._num_rows = self._tensor(np.repeat(sizes, num_features))

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)

    def chosen_keys(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keys of all hot and of all flex rows, in the order of the overlays."""
        tables = list(zip(self.first_keys, self.tiers.values(), strict=True))
        none = np.empty(0, np.int64)
        return (
            np.concatenate([none, *(first + tiers.hot for first, tiers in tables)]),
            np.concatenate([none, *(first + tiers.flex for first, tiers in tables)]),
        )

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

    def split(self, features: KeyedJaggedTensor) -> TierSplit:
        """Divide a batch. Other features than those of the tables are left out."""
        numbers = {name: number for number, name in enumerate(features.keys())}
        wanted = [numbers[name] for name in self.features]
        per_key, stride = features.length_per_key(), features.stride()
        all_lengths = features.lengths().view(len(numbers), stride)
        ids = _take(features, wanted)
        lengths = all_lengths if wanted == list(range(len(numbers))) else all_lengths[wanted]
        per_feature = [per_key[number] for number in wanted]

        # Among the hot rows, or behind those among the flex rows.
        place = self.places.find(self.keys(ids, per_feature))
        is_cold = place < 0
        cold_source = is_cold.nonzero().squeeze(1)
        hot = hot_source = flex = flex_source = place[:0]
        flex_sizes = place.new_zeros(self.ranks_per_node, len(wanted))
        if self.num_hot:
            hot_source = ((place >= 0) & (place < self.num_hot)).nonzero().squeeze(1)
            hot = place.index_select(0, hot_source)
        if self.num_flex:
            flex_source = (place >= self.num_hot).nonzero().squeeze(1)
            flex = place.index_select(0, flex_source) - self.num_hot
            owner = flex % self.ranks_per_node
            part = owner * len(wanted) + feature_of(flex_source, per_feature)
            part, order = torch.sort(part, stable=True)
            flex_source = flex_source.index_select(0, order)
            flex = (flex // self.ranks_per_node).index_select(0, order)
            flex_sizes = torch.bincount(part, minlength=flex_sizes.numel()).view_as(flex_sizes)

        ends = torch.cat([is_cold.new_zeros(1, dtype=torch.int64), is_cold.cumsum(0)])
        offsets = torch.cat([ends[:1], lengths.flatten().cumsum(0)])
        cold_lengths = ends.index_select(0, offsets).diff().to(lengths.dtype)
        others = [numbers[name] for name in self._others]
        cold_ids = ids.index_select(0, cold_source)
        if others:
            cold_ids = torch.cat([cold_ids, _take(features, others)])
            cold_lengths = torch.cat([cold_lengths, all_lengths[others].flatten()])
        cold = KeyedJaggedTensor(
            keys=self.features + self._others,
            values=cold_ids,
            lengths=cold_lengths,
            stride=stride,
        )
        return TierSplit(
            self,
            cold,
            hot,
            flex,
            flex_sizes,
            cold_source,
            hot_source,
            flex_source,
            ids,
            lengths,
            per_feature,
        )

    def keys(self, ids: Tensor, ids_per_feature: list[int]) -> Tensor:
        """Keys of the rows that tables without tiers would read, ``[n]`` int64.

        Of an id that is out of its table that is the first row of some shard, or none: -1.

        Args:
            ids: of the tiered features, feature by feature, ``[n]``.
            ids_per_feature: how many each has.
        """
        times = torch.tensor(ids_per_feature, device=ids.device)
        first_key = self._first_key.repeat_interleave(times, output_size=len(ids))
        num_rows = self._num_rows.repeat_interleave(times, output_size=len(ids))
        keys = ids + first_key
        outside = (ids < 0) | (ids >= num_rows)
        if outside.any():
            row = self._row_read_instead(ids, num_rows)
            exists = row < num_rows
            if self.num_ranks == 1:
                exists &= ids != -1  # stays -1, which FBGEMM does not replace
            keys = torch.where(outside, torch.where(exists, row + first_key, -1), keys)
        return keys

    def _row_read_instead(self, ids: Tensor, num_rows: Tensor) -> Tensor:
        """What TorchRec and FBGEMM take for ids that are out of their table.

        Ids beyond the shards, and negative ones taken as unsigned, go to the ranks in turns
        (fbgemm.block_bucketize_sparse_features). There they are out of the shard, of which FBGEMM
        takes the first row, and warns.
        """
        block = (num_rows + self.num_ranks - 1) // self.num_ranks
        wrapped = 2 ** (8 * ids.element_size()) % self.num_ranks
        rank = (ids.remainder(self.num_ranks) + wrapped * (ids < 0)).remainder(self.num_ranks)
        in_a_shard = (ids >= 0) & (ids < block * self.num_ranks)
        return torch.where(in_a_shard, ids // block, rank) * block


def feature_of(source: Tensor, ids_per_feature: list[int]) -> Tensor:
    """The number of the feature of each of some ids, told by their places in the batch."""
    ends = torch.tensor(ids_per_feature, device=source.device).cumsum(0)
    return torch.bucketize(source, ends, right=True)


def _take(features: KeyedJaggedTensor, numbers: list[int]) -> Tensor:
    """Values of some keys, one key after the other."""
    values, offsets = features.values(), features.offset_per_key()
    if numbers == list(range(len(offsets) - 1)):
        return values
    return torch.cat([values[offsets[number] : offsets[number + 1]] for number in numbers])
