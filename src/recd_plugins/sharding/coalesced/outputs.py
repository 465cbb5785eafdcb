"""Expands the embeddings of distinct ids to embeddings, or pooled bags, of all ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
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

from recd_plugins.sharding.coalesced import kernels
from recd_plugins.sharding.coalesced.fused_bags import BagColumns, expand_at_once, pool_at_once
from recd_plugins.sharding.coalesced.input_dist import Coalesced, FeatureGroups
from recd_plugins.sparse.index_select import HALF_PRECISION

_COMPILED = (torch.float32, torch.float64)


class _Part(NamedTuple):
    """Received rows that fill some columns of an EmbeddingBagCollection's output.

    ``start`` is the first scalar of the rows in their source. ``bags`` are the row of each id, the
    start of each bag and the weights; None for no pooling. ``inverse`` is the bag (or row, without
    pooling) of each output row; None means the identity.
    """

    columns: BagColumns
    start: int
    num_rows: int
    bags: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None
    inverse: NDArray[Any] | None

    def rows(self, sources: Sequence[NDArray[Any]]) -> NDArray[Any]:
        dim = self.columns.dim
        flat = sources[self.columns.source][self.start : self.start + self.num_rows * dim]
        return flat.reshape(self.num_rows, dim)


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
        sources: ``[R_i, D]`` each.
        of: index of the source for each tensor of ``indices``.
        indices: int64 ``[n_i]`` each.
        starts: the index of the first row of each tensor of ``indices``; 0 on CPU.
    """
    if all(_is_on_cpu(each) and each.dtype in _COMPILED for each in sources):
        assert not any(starts), "on CPU, each table counts from 0"
        return list(_Expand.apply(of, len(sources), *sources, *indices))  # type: ignore[no-untyped-call]
    halves = [source.dtype in HALF_PRECISION for source in sources]
    if any(halves):
        wide = [s.float() if half else s for s, half in zip(sources, halves, strict=True)]
        rows = expand(wide, of, indices, starts)
        return [each.to(sources[n].dtype) for n, each in zip(of, rows, strict=True)]
    if len({(source.dtype, source.shape[1]) for source in sources}) == 1:
        return expand_at_once(sources, of, indices, starts)
    return [
        sources[n].index_select(0, index - start)
        for n, index, start in zip(of, indices, starts, strict=True)
    ]


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, of: Sequence[int], num_sources: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        sources, indices = tensors[:num_sources], tensors[num_sources:]
        ctx.save_for_backward(*indices)
        ctx.of, ctx.shapes = of, [source.shape for source in sources]
        ctx.set_materialize_grads(False)
        rows, outputs = [_array(source) for source in sources], []
        for n, index in zip(of, indices, strict=True):
            out = sources[n].new_empty(len(index), sources[n].shape[1])
            kernels.gather(rows[n], _array(index), _array(out), 0)
            outputs.append(out)
        learns = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(
            *(out for n, out in zip(of, outputs, strict=True) if not learns[n])
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        sums: list[Tensor | None] = [None] * len(ctx.shapes)
        for n, index, gradient in zip(ctx.of, ctx.saved_tensors, gradients, strict=True):
            if gradient is not None:
                if (out := sums[n]) is None:
                    out = sums[n] = gradient.new_zeros(ctx.shapes[n])
                kernels.add_back(_array(gradient), 0, _array(index), _array(out))
        return (None, None, *sums, *(None for _ in gradients))


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: Sequence[_Part], num_rows: int, width: int, *sources: Tensor
    ) -> Tensor:
        ctx.parts, ctx.sizes = parts, [len(source) for source in sources]
        output = sources[0].new_zeros(num_rows, width)
        flats, out = [_array(source) for source in sources], output.numpy()
        for part in parts:
            rows, column, dim = part.rows(flats), part.columns.column, part.columns.dim
            if part.bags is not None and part.inverse is not None:
                bags = np.zeros((len(part.bags[1]) - 1, dim), out.dtype)
                kernels.pool(rows, *part.bags, bags, 0)
                kernels.gather(bags, part.inverse, out, column)
            elif part.bags is not None:
                kernels.pool(rows, *part.bags, out, column)
            elif part.inverse is not None:
                kernels.gather(rows, part.inverse, out, column)
            else:
                out[:, column : column + dim] = rows
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        results = [gradients.new_zeros(size) for size in ctx.sizes]
        flats, given = [result.numpy() for result in results], _array(gradients)
        parts: Sequence[_Part] = ctx.parts
        for part in parts:
            rows, column, dim = part.rows(flats), part.columns.column, part.columns.dim
            if part.bags is not None and part.inverse is not None:
                bags = np.zeros((len(part.bags[1]) - 1, dim), given.dtype)
                kernels.add_back(given, column, part.inverse, bags)
                kernels.spread(bags, 0, *part.bags, rows)
            elif part.bags is not None:
                kernels.spread(given, column, *part.bags, rows)
            elif part.inverse is not None:
                kernels.add_back(given, column, part.inverse, rows)
            else:
                rows += given[:, column : column + dim]
        return (None, None, None, *results)


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().contiguous().numpy()
    return array


#: Shardings whose kernels sum a rank's part of each bag, even for mean pooling.
_SUMMED = {
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
}


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
        self.columns: list[BagColumns] = []
        for source, name, first, dim in found:
            feature, at, table = name.partition("@")
            (config,) = [c for c in tables[feature] if not at or c.name == table]
            carrier = carriers.get(feature, feature) + at + table
            row_wise = shardings[config.name].sharding_type in _SUMMED
            # The kernels of other shardings have already divided their sums.
            mean = divides and config.pooling == PoolingType.MEAN
            mean = mean and (row_wise or feature in carriers)
            column = starts[name] + first
            self.columns.append(
                BagColumns(feature, source, dim, column, place[carrier, first], mean)
            )

    def pool(self, sources: list[Tensor], batch: Coalesced, num_rows: Sequence[int]) -> Tensor:
        """Return the pooled embeddings of all features, ``[batch.num_rows, sum(self.dims)]``.

        ``sources`` are flat tensors of embedding rows. ``num_rows`` has the number of rows that
        this rank received per column shard.
        """
        if (dtype := sources[0].dtype) in HALF_PRECISION:
            return self.pool([rows.float() for rows in sources], batch, num_rows).to(dtype)
        if not _is_on_cpu(sources[0]):
            return pool_at_once(sources, self.columns, batch, num_rows)
        starts, totals = [], dict[int, int]()
        for columns, rows in zip(self.columns, num_rows, strict=True):
            starts.append(totals.get(columns.source, 0))
            totals[columns.source] = starts[-1] + rows * columns.dim
        bags = {
            key: _bags(batch, *key) for key in {(each.feature, each.mean) for each in self.columns}
        }
        inverse = {name: _array(rows) for name, rows in batch.inverse_indices.items()}
        parts = [
            _Part(
                columns,
                starts[columns.carrier],
                num_rows[columns.carrier],
                bags[columns.feature, columns.mean],
                inverse.get(columns.feature),
            )
            for columns in self.columns
        ]
        return _Pool.apply(parts, batch.num_rows, sum(self.dims), *sources)  # type: ignore[no-untyped-call]


def _bags(
    batch: Coalesced, feature: str, mean: bool
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
    """Return the row of each id, the start of each bag, and weights that include the means."""
    lengths, index = batch.lengths[feature].long(), batch.inverse.get(feature)
    share = lengths.clamp(min=1).float().reciprocal() if mean else None
    if index is None:
        if share is None:
            return None
        rows = np.arange(len(lengths) + 1)
        return rows[:-1], rows, _array(share)
    weights = batch.weights.get(feature)
    if share is not None:
        weights = share.repeat_interleave(lengths, output_size=len(index))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    no_weights = np.empty(0, np.float32)
    return _array(index), _array(offsets), no_weights if weights is None else _array(weights)


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
