"""Expands the embeddings of distinct ids to embeddings, or pooled bags, of all ids.

The number of operators does not depend on the number of features. On CPU, compiled loops replace
PyTorch's operators, which are up to 40 times slower.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyGetItemMixin,
    ParameterSharding,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recd_plugins.sharding.coalesced import kernels
from recd_plugins.sharding.coalesced.input_dist import Coalesced, FeatureGroups, numbers_on
from recd_plugins.sharding.wire import ADDED_ON_THE_WAY
from recd_plugins.sparse.index_select import HALF_PRECISION


@dataclass(frozen=True)
class BagColumns:
    """Output columns of one feature and table, or of a column shard of the table.

    Attributes:
        column: first of the ``dim`` output columns.
        carrier: index of the ``BagColumns`` that received the rows of the same table.
        mean: whether sums are divided by the number of ids.
    """

    feature: str
    dim: int
    column: int
    carrier: int
    mean: bool


def expand(
    sources: Sequence[Tensor],
    of: Sequence[int],
    indices: Sequence[Tensor],
    starts: Sequence[int],
) -> list[Tensor]:
    """Return ``sources[of[n]].index_select(0, indices[n] - starts[n])`` for each n.

    The backward pass sums gradients per row, in float32 for half precision. On CUDA, the last bits
    may differ from run to run.

    Args:
        sources: ``[R_i, D_i]`` each.
        of: index of the source for each tensor of ``indices``.
        indices: int64 ``[n_i]`` each.
        starts: the index of the first row of each tensor of ``indices``.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for n, source in enumerate(sources):
        groups[source.dtype, source.shape[1], source.requires_grad].append(n)
    outputs: dict[int, Tensor] = {}
    for (dtype, *_), group in groups.items():
        rows = torch.cat([sources[n] for n in group])
        first = dict(zip(group, accumulate([0, *(len(sources[n]) for n in group)]), strict=False))
        own = [n for n, source in enumerate(of) if source in first]
        sizes = [len(indices[n]) for n in own]
        shifts = [first[of[n]] - starts[n] for n in own]
        index = _shifted(torch.cat([indices[n] for n in own]), shifts, sizes)
        rows = _gather(rows.float() if dtype in HALF_PRECISION else rows, index).to(dtype)
        outputs.update(zip(own, torch.split(rows, sizes), strict=True))
    return [outputs[n] for n in range(len(indices))]


def _shifted(index: Tensor, shifts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Add a number to each segment of ``index``."""
    if not any(shifts):
        return index
    shift, size = numbers_on(index.device, shifts, sizes)
    return index + shift.repeat_interleave(size, output_size=len(index))


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().contiguous().numpy()
    return array


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    if not _is_on_cpu(rows):
        return rows.index_select(0, index)
    gathered: Tensor = _Gather.apply(rows, index)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(rows)
        output = rows.new_empty(len(index), rows.shape[1])
        kernels.gather(_array(rows), _array(index), output.numpy())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sums = gradient.new_zeros(ctx.num_rows, gradient.shape[1])
        kernels.add_back(_array(gradient), _array(*ctx.saved_tensors), sums.numpy())
        return sums, None


def _pool(
    rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool
) -> Tensor:
    """Return ``F.embedding_bag`` of rows ``[R, D]``, also for R = 0. Weights exclude ``mean``."""
    if _is_on_cpu(rows):
        if mean:
            lengths = offsets.diff()
            shares = lengths.clamp(min=1).float().reciprocal()
            weights = shares.repeat_interleave(lengths, output_size=len(index))
        if weights is None:
            weights = torch.ones(len(index))
        pooled: Tensor = _Pool.apply(rows, index, offsets, weights)  # type: ignore[no-untyped-call]
        return pooled
    if not len(rows):  # embedding_bag refuses this case
        return rows.sum() + rows.new_zeros(len(offsets) - 1, rows.shape[1])
    return F.embedding_bag(
        index,
        rows,
        offsets,
        mode="mean" if mean else "sum",
        per_sample_weights=None if weights is None else weights.to(rows.dtype),
        include_last_offset=True,
    )


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *bags: Tensor) -> Tensor:
        ctx.save_for_backward(*bags)
        ctx.num_rows = len(rows)
        output = rows.new_zeros(len(bags[1]) - 1, rows.shape[1])
        index, offsets, weights = map(_array, bags)
        kernels.pool(_array(rows), index, offsets, weights, output.numpy())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sums = gradient.new_zeros(ctx.num_rows, gradient.shape[1])
        index, offsets, weights = map(_array, ctx.saved_tensors)
        kernels.spread(_array(gradient), index, offsets, weights, sums.numpy())
        return sums, None, None, None


class BagLayout:
    """Maps each feature's embeddings to columns of an EmbeddingBagCollection's output."""

    def __init__(
        self,
        sharded: ShardedEmbeddingBagCollection,
        configs: Sequence[EmbeddingBagConfig],
        shardings: Mapping[str, ParameterSharding],
        groups: FeatureGroups,
        *,
        divides: bool = True,
    ) -> None:
        self.names: list[str] = sharded._embedding_names
        self.dims: list[int] = sharded._embedding_dims
        carriers = groups.carriers
        found = [
            (name, 0 if shard is None else shard.shard_offsets[1], dim)
            for sharding in sharded._embedding_shardings
            for name, dim, shard in zip(
                sharding.uncombined_embedding_names(),
                sharding.uncombined_embedding_dims(),
                sharding.embedding_shard_metadata(),
                strict=True,
            )
        ]
        starts = dict(zip(self.names, accumulate([0, *self.dims]), strict=False))
        place = {(name, first): number for number, (name, first, _) in enumerate(found)}
        self.columns: list[BagColumns] = []
        for name, first, dim in found:
            feature, at, table = name.partition("@")
            (config,) = [
                c for c in configs if feature in c.feature_names and (not at or c.name == table)
            ]
            carrier = carriers.get(feature, feature) + at + table
            # Kernels of row-wise tables sum a rank's part of each bag; others divide their sums.
            row_wise = shardings[config.name].sharding_type in ADDED_ON_THE_WAY
            mean = divides and config.pooling == PoolingType.MEAN
            mean = mean and (row_wise or feature in carriers)
            column = starts[name] + first
            self.columns.append(BagColumns(feature, dim, column, place[carrier, first], mean))

    def pool(self, sources: list[Tensor], batch: Coalesced, num_rows: Sequence[int]) -> Tensor:
        """Return the pooled embeddings of all features, ``[batch.num_rows, sum(self.dims)]``.

        Args:
            sources: flat tensors of embedding rows, in the order of ``self.columns``.
            batch: local data of the batch.
            num_rows: number of rows that this rank received for each of ``self.columns``.
        """
        if (dtype := sources[0].dtype) in HALF_PRECISION:
            return self.pool([rows.float() for rows in sources], batch, num_rows).to(dtype)
        rows, first = self._rows_by_width(sources, num_rows)
        groups: dict[tuple[int, bool, bool], list[int]] = defaultdict(list)
        order = sorted(range(len(self.columns)), key=lambda number: self.columns[number].column)
        for number in order:
            each = self.columns[number]
            groups[each.dim, each.feature in batch.inverse, each.mean].append(number)
        blocks: dict[int, Tensor] = {}
        for (dim, _, mean), group in groups.items():
            features = [self.columns[number].feature for number in group]
            starts = [first[self.columns[number].carrier] for number in group]
            output = _pool_group(rows[dim], features, starts, batch, mean)
            if len(groups) == 1:
                return output.flatten(1)
            blocks.update(zip(group, output.unbind(1), strict=True))
        return torch.cat([blocks[number] for number in order], dim=1)

    def _rows_by_width(
        self, sources: Sequence[Tensor], num_rows: Sequence[int]
    ) -> tuple[dict[int, Tensor], list[int]]:
        """Return a dict from width to rows ``[R, width]``, and the first row of each column."""
        flat = torch.cat(list(sources)) if len(sources) > 1 else sources[0]
        counts, first, sizes = Counter[int](), [], []
        for each, count in zip(self.columns, num_rows, strict=True):
            first.append(counts[each.dim])
            counts[each.dim] += count
            sizes.append(count * each.dim)
        if len(counts) == 1:
            return {dim: flat.view(-1, dim) for dim in counts}, first
        parts: dict[int, list[Tensor]] = defaultdict(list)
        for each, part in zip(self.columns, torch.split(flat, sizes), strict=True):
            parts[each.dim].append(part)
        return {dim: torch.cat(own).view(-1, dim) for dim, own in parts.items()}, first


def _pool_group(
    rows: Tensor, features: Sequence[str], first: Sequence[int], batch: Coalesced, mean: bool
) -> Tensor:
    """Return ``[B, len(features), D]`` for features with equal width and pooling.

    ``first`` has the index in ``rows``, ``[R, D]``, of each feature's first row.
    """
    sent = [batch.inverse[feature] for feature in features if feature in batch.inverse]
    if sent or mean:
        lengths = [batch.lengths[feature] for feature in features]
        bags, sizes = [0, *accumulate(map(len, lengths))], list(map(len, sent or lengths))
        weights = None
        if sent:
            index, starts = torch.cat(sent), [batch.first[feature] for feature in features]
            offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.cat(lengths).long())
            if batch.weights and not mean:
                weights = torch.cat([batch.weights[feature] for feature in features])
        else:  # the kernel has pooled the rows, which are divided here by the number of their ids
            offsets = torch.arange(bags[-1] + 1, device=rows.device)
            index, starts = offsets[:-1], bags[:-1]
            weights = torch.cat(lengths).clamp(min=1).to(rows.dtype).reciprocal()
        shifts = [row - start for row, start in zip(first, starts, strict=True)]
        rows = _pool(rows, _shifted(index, shifts, sizes), offsets, weights, bool(sent) and mean)
        first = bags[:-1]
        if not batch.inverse_indices:
            return rows.view(len(features), batch.num_rows, rows.shape[1]).transpose(0, 1)
    if batch.inverse_indices:
        inverse = torch.stack([batch.inverse_indices[feature] for feature in features], dim=1)
    else:
        inverse = torch.arange(batch.num_rows, device=rows.device).unsqueeze(1)
    places = inverse + numbers_on(rows.device, first)
    return _gather(rows, places.flatten()).view(*places.shape, rows.shape[1])


class CoalescedBags(LazyGetItemMixin[str, Tensor], LazyAwaitable[KeyedTensor]):
    """Awaitable of pooled embeddings of all bags, computed from embeddings of unique ids."""

    def __init__(
        self,
        rows: Sequence[Awaitable[Tensor]],
        num_rows: Sequence[int],
        batch: Coalesced,
        layout: BagLayout,
    ) -> None:
        super().__init__()
        self._rows, self._num_rows = rows, num_rows
        self._batch, self._layout = batch, layout

    def _wait_impl(self) -> KeyedTensor:
        sources = [rows.wait().view(-1) for rows in self._rows]
        layout = self._layout
        return KeyedTensor(
            keys=layout.names,
            length_per_key=layout.dims,
            values=layout.pool(sources, self._batch, self._num_rows),
            key_dim=1,
        )


class CoalescedSequences(LazyAwaitable[dict[str, JaggedTensor]]):
    """Awaitable of the embeddings of all ids, expanded from embeddings of unique ids."""

    def __init__(
        self,
        unique: LazyAwaitable[dict[str, JaggedTensor]],
        batch: Coalesced,
        groups: FeatureGroups,
        need_indices: bool,
    ) -> None:
        super().__init__()
        self._unique, self._batch = unique, batch
        self._carriers, self._need_indices = groups.carriers, need_indices

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        outputs = dict(self._unique.wait())
        carried: list[tuple[str, str, str]] = []
        for name in outputs:
            # TorchRec names the outputs feature@table if a feature looks up several tables.
            feature, at, table = name.partition("@")
            if feature in self._carriers:
                carried.append((name, feature, self._carriers[feature] + at + table))
        sources = list(dict.fromkeys(carrier for _, _, carrier in carried))
        expanded = expand(
            [outputs[carrier].values() for carrier in sources],
            [sources.index(carrier) for _, _, carrier in carried],
            [self._batch.inverse[feature] for _, feature, _ in carried],
            [self._batch.first[feature] for _, feature, _ in carried],
        )
        for (name, feature, _), values in zip(carried, expanded, strict=True):
            outputs[name] = JaggedTensor(
                values=values,
                lengths=self._batch.lengths[feature],
                weights=self._batch.ids[feature] if self._need_indices else None,
            )
        return outputs
