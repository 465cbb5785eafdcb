"""Splits the ids of a batch into hot, flex and cold ids (copied to ranks, to nodes, or not)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime.collection import RowTiers
from recd_plugins.api import DataError

# 2^64 over the golden ratio: its multiples are spread evenly (Knuth, vol. 3, 6.4).
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_NO_KEY = np.iinfo(np.int64).min


class Places:
    """Hash table from int64 keys to their index in ``keys``.

    On CPU, a lookup is about five times as fast as a binary search. Keys are sorted by bucket, and
    a lookup compares only the few keys of one bucket. A GPU does a binary search in one kernel.

    Args:
        keys: distinct keys, int64 ``[num_keys]``. The smallest int64 is not allowed.
        device: device of the keys that ``find`` receives.
    """

    def __init__(self, keys: NDArray[np.int64], device: torch.device) -> None:
        self._by_search = device.type == "cuda"
        if self._by_search:
            # The last key is in the place -1, like keys that are missing.
            ordered = np.argsort(keys)
            self._keys = torch.from_numpy(np.append(keys[ordered], _NO_KEY)).to(device)
            self._places = torch.from_numpy(np.append(ordered, -1)).to(device)
            return
        self._bits = max(1, len(keys).bit_length() - 1)
        bucket = self._bucket(torch.from_numpy(keys))
        order = torch.argsort(bucket, stable=True)
        sizes = torch.bincount(bucket, minlength=2**self._bits)
        self._most = max(1, int(sizes.max()))
        # A search past the last bucket finds nothing.
        rest = torch.full((self._most,), _NO_KEY)
        self._keys = torch.cat([torch.from_numpy(keys)[order], rest]).to(device)
        self._places = torch.cat([order, torch.zeros_like(rest)]).int().to(device)
        self._starts = (sizes.cumsum(0) - sizes).int().to(device)

    def find(self, keys: Tensor) -> Tensor:
        """Return the index of each key in the constructor's ``keys``, int64; -1 if missing."""
        if self._by_search:
            at = torch.searchsorted(self._keys[:-1], keys)
            return torch.where(self._keys[at] == keys, self._places[at], self._places[-1])
        at = self._starts.index_select(0, self._bucket(keys))
        for _ in range(self._most - 1):
            at = at + (self._keys.index_select(0, at) != keys)
        found = self._keys.index_select(0, at) == keys
        return torch.where(found, self._places.index_select(0, at), -1).long()

    def _bucket(self, keys: Tensor) -> Tensor:
        return (keys * _GOLDEN) >> (64 - self._bits) & (2**self._bits - 1)


@dataclass(frozen=True, eq=False)
class TierSplit:
    """The ids of one batch, split by tier: hot (copied to every rank), flex (to every node), cold.

    F is the number of features of tables with row copies, and n the number of their ids.

    Attributes:
        index: the TierIndex that split the batch.
        cold: ids without a copy, and all ids of tables without row copies.
        hot: index of each hot id among this rank's hot copies, int64 ``[num_hot]``.
        flex: index of each flex id among the flex copies of the rank that has its copy, int64
            ``[num_flex]``, sorted by rank and then by feature.
        flex_sizes: number of flex ids by rank and feature, int64 ``[ranks_per_node, F]``.
        cold_source: index of each cold id in ``ids``, int64 ``[num_cold]``.
        hot_source: index of each hot id in ``ids``, int64 ``[num_hot]``.
        flex_source: index of each flex id in ``ids``, int64 ``[num_flex]``.
        ids: ids of the F features, ``[n]``.
        lengths: lengths of the F features, ``[F, stride]``.
        ids_per_feature: number of ids of each of the F features.
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
        """Call ``Tensor.record_stream`` for all tensors of the split."""
        for value in vars(self).values():
            if isinstance(value, Tensor):
                value.record_stream(stream)


@dataclass(eq=False)
class TierIndex:
    """Index of all hot rows (copied to every rank) and flex rows (copied to every node).

    The key of a row is its index in the concatenation of all tables with row copies.

    Attributes:
        features: features of the tables with row copies, table by table.
        first_keys: key of the first row of each table with row copies, int64 ``[num_tables]``.
        places: maps the key of a hot or flex row to its index in the list of hot, then flex rows.
        num_hot: number of hot rows of all tables.
        num_flex: number of flex rows of all tables.
    """

    configs: Sequence[EmbeddingConfig]
    tiers: Mapping[str, RowTiers]
    ranks_per_node: int
    device: torch.device
    features: list[str] = field(init=False)
    first_keys: NDArray[np.int64] = field(init=False)
    places: Places = field(init=False)
    num_hot: int = field(init=False)
    num_flex: int = field(init=False)

    def __post_init__(self) -> None:
        tiered = [config for config in self.configs if config.name in self.tiers]
        self.features = [name for config in tiered for name in config.feature_names]
        others = [config for config in self.configs if config.name not in self.tiers]
        self._others = [name for config in others for name in config.feature_names]
        sizes = np.array([config.num_embeddings for config in tiered], dtype=np.int64)
        self.first_keys = np.cumsum(sizes) - sizes
        chosen = self.chosen_keys()
        self.num_hot, self.num_flex = map(len, chosen)
        self.places = Places(np.concatenate(chosen), self.device)
        num_features = [len(config.feature_names) for config in tiered]
        self._first_key = self._tensor(np.repeat(self.first_keys, num_features))
        self._num_rows = self._tensor(np.repeat(sizes, num_features))

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)

    def chosen_keys(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the keys of rows copied to every rank, and of rows copied to every node, int64."""
        tables = list(zip(self.first_keys, self.tiers.values(), strict=True))
        none = np.empty(0, np.int64)
        return (
            np.concatenate([none, *(first + tiers.hot for first, tiers in tables)]),
            np.concatenate([none, *(first + tiers.flex for first, tiers in tables)]),
        )

    def hot_rows(self) -> dict[str, Tensor]:
        """Return a dict from table name to the rows copied to every rank, int64."""
        return {name: self._tensor(rows.hot) for name, rows in self.tiers.items()}

    def flex_rows(self, local_rank: int) -> dict[str, Tensor]:
        """Return a dict from table name to the rows copied to ``local_rank``, int64."""
        return {name: self._tensor(rows) for name, rows in self._flex_rows(local_rank).items()}

    def hot_sizes(self) -> dict[str, int]:
        """Return a dict from table name to the number of rows copied to every rank."""
        return {name: len(rows.hot) for name, rows in self.tiers.items()}

    def flex_sizes(self, local_rank: int) -> dict[str, int]:
        """Return a dict from table name to the number of rows copied to ``local_rank``."""
        return {name: len(rows) for name, rows in self._flex_rows(local_rank).items()}

    def _flex_rows(self, local_rank: int) -> dict[str, NDArray[np.int64]]:
        rows, start = {}, 0
        for name, tiers in self.tiers.items():
            first = (local_rank - start) % self.ranks_per_node
            rows[name] = tiers.flex[first :: self.ranks_per_node]
            start += len(tiers.flex)
        return rows

    def split(self, features: KeyedJaggedTensor) -> TierSplit:
        """Split the ids of a batch by rows copied to every rank, to every node, and not copied."""
        numbers = {name: number for number, name in enumerate(features.keys())}
        wanted = [numbers[name] for name in self.features]
        per_key, stride = features.length_per_key(), features.stride()
        all_lengths = features.lengths().view(len(numbers), stride)
        ids = _take(features, wanted)
        lengths = all_lengths if wanted == list(range(len(numbers))) else all_lengths[wanted]
        per_feature = [per_key[number] for number in wanted]

        # Indexes of hot rows come first, then those of flex rows.
        of_ids = _features_of_ids(ids, lengths)
        place = self.places.find(self._first_key.index_select(0, of_ids) + ids)
        is_cold, is_flex = place < 0, place >= self.num_hot
        offsets_of = torch.ops.fbgemm.asynchronous_complete_cumsum
        ends = offsets_of(is_cold.to(lengths.dtype))
        cold_lengths = ends.index_select(0, offsets_of(lengths.flatten())).diff().view_as(lengths)
        sums = torch.stack([self._outside(ids, of_ids), is_flex]).sum(1)
        # The only wait for the device.
        num_outside, num_flex, *num_cold = torch.cat([sums, cold_lengths.sum(1)]).tolist()
        if num_outside:
            self._refuse_outside(ids, of_ids)
        cold_source = nonzero(is_cold, sum(num_cold))
        hot = hot_source = flex = flex_source = place[:0]
        flex_sizes = place.new_zeros(self.ranks_per_node, len(wanted))
        if self.num_hot:
            num_hot = len(ids) - sum(num_cold) - num_flex
            hot_source = nonzero(is_cold == is_flex, num_hot)  # neither
            hot = place.index_select(0, hot_source)
        if self.num_flex:
            flex_source = nonzero(is_flex, num_flex)
            flex = place.index_select(0, flex_source) - self.num_hot
            owner = flex % self.ranks_per_node
            part = owner * len(wanted) + feature_of(flex_source, lengths)
            part, order = torch.sort(part, stable=True)
            flex_source = flex_source.index_select(0, order)
            flex = (flex // self.ranks_per_node).index_select(0, order)
            flex_sizes.view(-1).index_add_(0, part, torch.ones_like(part))

        cold_ids = ids.index_select(0, cold_source)
        cold_lengths = cold_lengths.flatten()
        if others := [numbers[name] for name in self._others]:
            cold_ids = torch.cat([cold_ids, _take(features, others)])
            cold_lengths = torch.cat([cold_lengths, all_lengths[others].flatten()])
        cold = KeyedJaggedTensor(
            self.features + self._others,
            cold_ids,
            lengths=cold_lengths,
            stride=stride,
            length_per_key=num_cold + [per_key[number] for number in others],
        )
        sources = (cold_source, hot_source, flex_source)
        return TierSplit(self, cold, hot, flex, flex_sizes, *sources, ids, lengths, per_feature)

    def keys(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the keys of looked-up rows, int64 ``[n]``.

        Args:
            ids: ids looked up in tables with row copies, feature by feature, ``[n]``.
            lengths: lengths of the features, ``[F, stride]``.
        """
        return ids + self._first_key.index_select(0, _features_of_ids(ids, lengths))

    def _outside(self, ids: Tensor, of_ids: Tensor) -> Tensor:
        return (ids < 0) | (ids >= self._num_rows.index_select(0, of_ids))

    def _refuse_outside(self, ids: Tensor, of_ids: Tensor) -> None:
        place = self._outside(ids, of_ids).nonzero()[0]
        number = int(of_ids[place])
        raise DataError(
            f"feature {self.features[number]!r} has the id {int(ids[place])}, but its table has "
            f"only rows 0 to {int(self._num_rows[number]) - 1}. Enlarge the table, or hash the ids."
        )


def nonzero(mask: Tensor, count: int) -> Tensor:
    """Return the indices where ``mask`` is True along its last dimension, int64 ``[count]``.

    Unlike ``Tensor.nonzero``, this function does not wait for the device.
    """
    return torch.nonzero_static(mask, size=count)[:, -1].contiguous()


def feature_of(source: Tensor, lengths: Tensor) -> Tensor:
    """Return the feature index, int64, of the ids at positions ``source``."""
    return torch.bucketize(source, lengths.sum(1).cumsum(0), right=True)


def _features_of_ids(ids: Tensor, lengths: Tensor) -> Tensor:
    """Return the feature index of each id, int64 ``[len(ids)]``."""
    return torch.repeat_interleave(lengths.sum(1), output_size=len(ids))


def _take(features: KeyedJaggedTensor, numbers: list[int]) -> Tensor:
    """Return the concatenated values of the features with the indices ``numbers``."""
    values, offsets = features.values(), features.offset_per_key()
    if numbers == list(range(len(offsets) - 1)):
        return values
    return torch.cat([values[offsets[number] : offsets[number + 1]] for number in numbers])
