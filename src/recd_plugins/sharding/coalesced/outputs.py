"""Outputs of coalesced collections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyGetItemMixin,
    ParameterSharding,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recd_plugins.sharding.coalesced.groups import FeatureGroups
from recd_plugins.sharding.coalesced.input_dist import Coalesced
from recd_plugins.sharding.coalesced.rows import Bags, Part, expand, pool

#: Their kernels sum what a rank has of a bag, of mean pooling too.
_SUMMED = {
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
}


@dataclass(frozen=True)
class _Columns:
    """Columns of a feature's embedding that one shard has.

    Attributes:
        feature: whose embedding it is.
        source: number of the sharding that returns the rows.
        dim: columns.
        column: the first of them in the output.
        carrier: number of the _Columns whose rows these are.
        mean: whether rows are to be divided by the length of the bag.
    """

    feature: str
    source: int
    dim: int
    column: int
    carrier: int
    mean: bool


class BagLayout:
    """Where the rows of each feature come from, and which columns of the output are its own.

    Args:
        sharded: the module.
        configs: of its tables.
        shardings: of its tables, by name.
        groups: of its features.
    """

    def __init__(
        self,
        sharded: ShardedEmbeddingBagCollection,
        configs: Sequence[EmbeddingBagConfig],
        shardings: Mapping[str, ParameterSharding],
        groups: FeatureGroups,
    ) -> None:
        self.names: list[str] = sharded._embedding_names
        self.dims: list[int] = sharded._embedding_dims
        carriers = groups.carriers
        tables: dict[str, list[EmbeddingBagConfig]] = {}
        for config in configs:
            for feature in config.feature_names:
                tables.setdefault(feature, []).append(config)
        found: list[tuple[int, str, int, int]] = []  # source, name, first column, dim
        for source, sharding in enumerate(sharded._embedding_shardings):
            found += [
                (source, name, 0 if shard is None else shard.shard_offsets[1], dim)
                for name, dim, shard in zip(
                    sharding.uncombined_embedding_names(),
                    sharding.uncombined_embedding_dims(),
                    sharding.embedding_shard_metadata(),
                    strict=True,
                )
            ]
        starts, start = {}, 0
        for name, dim in zip(self.names, self.dims, strict=True):
            starts[name] = start
            start += dim
        place = {(name, first): number for number, (_, name, first, _) in enumerate(found)}
        self.columns: list[_Columns] = []
        for source, name, first, dim in found:
            feature, at, table = name.partition("@")
            (config,) = [c for c in tables[feature] if not at or c.name == table]
            carrier = carriers.get(feature, feature) + at + table
            row_wise = shardings[config.name].sharding_type in _SUMMED
            # The kernels of other shardings have divided what they pooled.
            mean = config.pooling == PoolingType.MEAN and (row_wise or feature in carriers)
            column = starts[name] + first
            self.columns.append(_Columns(feature, source, dim, column, place[carrier, first], mean))

    def parts(self, batch: Coalesced, num_rows: Sequence[int]) -> list[Part]:
        """How the output is made of what the shardings return.

        Args:
            batch: what stayed on this rank.
            num_rows: that are returned for each of ``columns``.
        """
        starts, totals = [], dict[int, int]()
        for columns, rows in zip(self.columns, num_rows, strict=True):
            starts.append(totals.get(columns.source, 0))
            totals[columns.source] = starts[-1] + rows * columns.dim
        bags: dict[tuple[str, bool], Bags | None] = {}
        parts = []
        for columns in self.columns:
            key = (columns.feature, columns.mean)
            if key not in bags:
                bags[key] = _bags(batch, *key)
            parts.append(
                Part(
                    source=columns.source,
                    start=starts[columns.carrier],
                    num_rows=num_rows[columns.carrier],
                    dim=columns.dim,
                    column=columns.column,
                    bags=bags[key],
                    inverse=batch.inverse_indices.get(columns.feature),
                )
            )
        return parts


def _bags(batch: Coalesced, feature: str, mean: bool) -> Bags | None:
    """Of unique rows, or of pooled ones that are to be divided."""
    lengths, index = batch.lengths[feature].long(), batch.inverse.get(feature)
    share = lengths.clamp(min=1).float().reciprocal() if mean else None
    if index is None:
        if share is None:
            return None
        rows = torch.arange(len(lengths) + 1, device=lengths.device)
        return Bags(rows[:-1], rows, share)
    weights = batch.weights.get(feature)
    if share is not None:
        weights = share.repeat_interleave(lengths, output_size=len(index))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Bags(index, offsets, weights)


class CoalescedBags(LazyGetItemMixin[str, Tensor], LazyAwaitable[KeyedTensor]):
    """Pooled embeddings of all bags, from the embeddings of unique ids.

    Args:
        rows: what each sharding returns, flat.
        num_rows: for each of the layout's columns.
        batch: what stayed on this rank.
        layout: of the module.
    """

    def __init__(
        self,
        rows: Sequence[Awaitable[Tensor]],
        num_rows: Sequence[int],
        batch: Coalesced,
        layout: BagLayout,
    ) -> None:
        super().__init__()
        self._rows = rows
        self._num_rows = num_rows
        self._batch = batch
        self._layout = layout

    def _wait_impl(self) -> KeyedTensor:
        sources = [rows.wait().view(-1) for rows in self._rows]
        layout = self._layout
        parts = layout.parts(self._batch, self._num_rows)
        return KeyedTensor(
            keys=layout.names,
            length_per_key=layout.dims,
            values=pool(sources, parts, self._batch.num_rows, sum(layout.dims)),
            key_dim=1,
        )


class CoalescedSequences(LazyAwaitable[dict[str, JaggedTensor]]):
    """The embeddings of all ids, from those of the unique ones.

    Args:
        unique: of the module with unique ids.
        batch: what stayed on this rank.
        groups: of the module's features.
        need_indices: as EmbeddingCollection has it: outputs have the ids as weights.
    """

    def __init__(
        self,
        unique: LazyAwaitable[dict[str, JaggedTensor]],
        batch: Coalesced,
        groups: FeatureGroups,
        need_indices: bool,
    ) -> None:
        super().__init__()
        self._unique = unique
        self._batch = batch
        self._carriers = groups.carriers
        self._need_indices = need_indices

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        outputs = dict(self._unique.wait())
        carried: list[tuple[str, str, str]] = []
        for name in outputs:
            # TorchRec calls the outputs of a feature of several tables feature@table.
            feature, at, table = name.partition("@")
            if feature in self._carriers:
                carried.append((name, feature, self._carriers[feature] + at + table))
        sources = list(dict.fromkeys(carrier for _, _, carrier in carried))
        expanded = expand(
            [outputs[carrier].values() for carrier in sources],
            [sources.index(carrier) for _, _, carrier in carried],
            [self._batch.inverse[feature] for _, feature, _ in carried],
        )
        for (name, feature, _), values in zip(carried, expanded, strict=True):
            outputs[name] = JaggedTensor(
                values=values,
                lengths=self._batch.lengths[feature],
                weights=self._batch.ids[feature] if self._need_indices else None,
            )
        return outputs
