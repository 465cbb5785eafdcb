"""Layers of the built-in models, computed once per request row for user features.

A linear layer over user and candidate inputs is split into ``W_user u + W_candidate c``. The first
product is computed for U request rows instead of B batch rows, as are dot products of two user
vectors. Results equal those of the unsplit layers, up to floating-point rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torchrec.models.dlrm import DenseArch, OverArch
from torchrec.modules.crossnet import LowRankCrossNet, VectorCrossNet
from torchrec.sparse.jagged_tensor import KeyedTensor

from recd_plugins.config.schema import ModelSpec
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.model.cuda_graph import GraphedLoss
from recd_plugins.model.multi_task import MultiTaskArch
from recd_plugins.model.sequence_pooling import PooledSides
from recd_plugins.model.split_input import SplitInput, run_mlp
from recd_plugins.sparse.request_rows import RequestRows

# Minimum multiply-adds that the split must save per batch row. Below this, its gathers and small
# operations cost more than it saves. Measured on CPU, and estimated for CUDA.
_MIN_SAVED = {"cpu": 8_192, "cuda": 131_072}
# Batch rows per request row that an export assumes, to decide whether the program has the split.
_ROWS_OF_EXPORT = 100
# Minimum dense user features for a split of the bottom MLP. Fewer cost less than a gather.
_MIN_DENSE_COLUMNS = 8
# CUDA graphs need equal shapes in each step, so U is padded to a multiple of B / 32. The padding
# adds at most 3 % to the cost of the layers on batch rows.
_NUM_BUCKETS = 32


class RequestRowsOfBatch(nn.Module):
    """Decides per batch whether user layers are computed once per request row.

    This is a module so that the FX tracer treats it as a leaf.

    Args:
        spec: architecture and sizes of the model.
        features: the interacting features. If empty, all layers run on each batch row.
        num_dense: number of dense features.
        num_first_layers: number of layers that read the interaction, ``top_mlp[0]`` wide.
    """

    def __init__(
        self, spec: ModelSpec, features: Sequence[str], num_dense: int, num_first_layers: int = 1
    ) -> None:
        super().__init__()
        self.spec, self.features, self.num_dense = spec, frozenset(features), num_dense
        self.num_first_layers = num_first_layers

    def forward(self, batch: ModelInput) -> RequestRows | None:
        """Return the request rows of ``batch``, or None to compute all layers per batch row."""
        request, num_rows = batch.request, batch.labels.shape[0]
        if request is None or not self.features:
            return None
        if torch.compiler.is_exporting():  # for any number of rows
            num_rows = _ROWS_OF_EXPORT * request.num_rows
        saved = self._saved(request) * (num_rows - request.num_rows)
        if saved < _MIN_SAVED["cuda" if batch.labels.is_cuda else "cpu"] * max(1, num_rows):
            return None
        return padded(request) if request.inverse.is_cuda else request

    def _saved(self, request: RequestRows) -> int:
        """Return the multiply-adds of the user layers, for the forward pass of one row."""
        dim, num_dense = self.spec.embedding_dim, len(request.dense_columns)
        dense_of_user = num_dense == self.num_dense
        num_vectors = len(self.features.intersection(request.features)) + dense_of_user
        widths = [num_dense, *self.spec.bottom_mlp, dim] if dense_of_user and num_dense else []
        bottom = sum(one * other for one, other in pairwise(widths))
        if self.spec.architecture == "dcn":
            size = (len(self.features) + 1) * dim
            rank = self.spec.low_rank_dim or max(1, size // 4)
            outputs = {"low_rank": rank, "full": size, "vector": 1}[self.spec.cross_net]
            return bottom + num_vectors * dim * outputs
        pairs = num_vectors * (num_vectors - 1) // 2
        outputs = self.num_first_layers * self.spec.top_mlp[0]
        return bottom + pairs * dim + (pairs + dense_of_user * dim) * outputs


def padded(request: RequestRows) -> RequestRows:
    """Pad U to a multiple of ceil(B / 32): at most 32 shapes for CUDA graphs."""
    padding = -request.num_rows % -(-request.inverse.shape[0] // _NUM_BUCKETS)
    return replace(request, first_rows=F.pad(request.first_rows, (0, padding)))


class UserSplit:
    """Layers split into parts per request row and per batch row, for one set of user features.

    Args:
        names: the interacting features, in the order of the unsplit interaction. The vector of the
            dense features comes before them.
        num_dense: number of dense features.
        dim: length D of a vector.
        request: request rows, with the names of the user features.
        bags: pooled embeddings. Only their keys are used.
        pooled: pooled sequences. Only their feature names are used.
    """

    def __init__(
        self,
        names: Sequence[str],
        num_dense: int,
        dim: int,
        request: RequestRows,
        bags: Sequence[KeyedTensor],
        pooled: PooledSides | None,
    ) -> None:
        self.graphed = GraphedLoss()
        device = request.inverse.device

        def index(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        position = {name: n for n, name in enumerate(names, start=1)}
        user: list[int] = []
        rows: list[int] = []
        self._dense_of_user = len(request.dense_columns) == num_dense
        (user if self._dense_of_user else rows).append(0)
        self._sides_of_bags = []
        for keys in (tensor.keys() for tensor in bags):
            of_user = [n for n, key in enumerate(keys) if key in request.features]
            of_rows = [n for n, key in enumerate(keys) if key not in request.features]
            self._sides_of_bags.append((index(of_user), index(of_rows)))
            user += [position[keys[n]] for n in of_user]
            rows += [position[keys[n]] for n in of_rows]
        if pooled is not None:
            user += [position[name] for name in pooled.user_features]
            rows += [position[name] for name in pooled.row_features]
        self._dense_sides: tuple[Tensor, Tensor] | None = None
        if _MIN_DENSE_COLUMNS <= len(request.dense_columns) < num_dense:
            others = [n for n in range(num_dense) if n not in request.dense_columns]
            self._dense_sides = index(request.dense_columns), index(others)
        # Positions and columns of the cross network's input, [B, n * D].
        self._order = index(user + rows).argsort()
        scalars = torch.arange((len(names) + 1) * dim, device=device).view(-1, dim)
        self._user_scalars = scalars[index(user)].flatten()
        self._row_scalars = scalars[index(rows)].flatten()
        # Columns of the input of the top MLP after dot products, [B, D + n * (n - 1) / 2].
        num_vectors = len(user) + len(rows)
        column = torch.zeros(num_vectors, num_vectors, dtype=torch.int64, device=device)
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1, device=device)
        column[first, second] = column[second, first] = dim + torch.arange(
            len(first), device=device
        )
        self._user_pairs, user_columns = _pairs(column[user][:, user])
        self._row_pairs, row_columns = _pairs(column[rows][:, user + rows], len(user))
        dense = torch.arange(dim, device=device)
        self._user_columns = torch.cat([dense[: dim * self._dense_of_user], user_columns])
        self._row_columns = torch.cat([dense[dim * self._dense_of_user :], row_columns])

    def vectors(
        self, request: RequestRows, bags: Sequence[KeyedTensor], pooled: PooledSides | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the vectors of the request rows and of the batch rows.

        Both are lists of tensors, ``[U, F, D]`` and ``[B, F, D]``. F may be 0.
        """
        user: list[Tensor] = []
        rows: list[Tensor] = []
        for tensor, sides in zip(bags, self._sides_of_bags, strict=True):
            values = tensor.values().unflatten(1, (len(tensor.keys()), -1))
            found = _TakeSides.apply(values, request.first_rows, *sides)  # type: ignore[no-untyped-call]
            user.append(found[0])
            rows.append(found[1])
        if pooled is not None:
            user += [] if pooled.user is None else [pooled.user]
            rows += [] if pooled.rows is None else [pooled.rows]
        return user, rows

    def logits(
        self,
        request: RequestRows,
        dense: Tensor,
        user: Sequence[Tensor],
        rows: Sequence[Tensor],
        dense_arch: DenseArch | Tensor,
        crossnet: nn.Module | None,
        over_arch: OverArch | MultiTaskArch,
    ) -> Tensor:
        """Return the logits, ``[B, 1]`` or ``[B, T]``.

        Args:
            request: the request rows of the batch.
            dense: ``[B, num_dense]``.
            user, rows: the two lists of tensors from ``vectors``, ``[U, F, D]`` and ``[B, F, D]``.
            dense_arch: the bottom MLP. Without dense features: its constant output, ``[D]``.
            crossnet: the cross network; None for dot products.
            over_arch: the top MLP.
        """
        vector = self._dense_vector(request, dense, dense_arch)
        of_dense = [vector.unsqueeze(1)]
        if self._dense_of_user:
            user = [*of_dense, *user]
        else:
            rows = [*of_dense, *rows]
        of_user = _cat(user, request.num_rows, vector)
        of_rows = _cat(rows, dense.shape[0], vector)
        logits: Tensor
        if crossnet is None:
            products = self._dot_products(request, vector, of_user, of_rows)
            if isinstance(over_arch, MultiTaskArch):
                logits = over_arch(products)
            else:
                mlp, head = over_arch.model
                logits = head(run_mlp(mlp, products))
        else:
            x = torch.cat([request.expand(of_user), of_rows], dim=1).index_select(1, self._order)
            sides = of_user.flatten(1), of_rows.flatten(1)
            split = SplitInput(request, *sides, self._user_scalars, self._row_scalars)
            logits = over_arch(_crossed(crossnet, x.flatten(1), split))
        return logits

    def _dense_vector(
        self, request: RequestRows, dense: Tensor, dense_arch: DenseArch | Tensor
    ) -> Tensor:
        """Return the bottom MLP's output, ``[U, D]`` for user features only, else ``[B, D]``."""
        if isinstance(dense_arch, Tensor):
            return dense_arch.expand(request.num_rows, -1)
        if self._dense_of_user:
            return dense_arch(request.select(dense))
        if self._dense_sides is None:
            return dense_arch(dense)
        of_user, of_rows = self._dense_sides
        user = request.select(dense).index_select(1, of_user)
        split = SplitInput(request, user, dense.index_select(1, of_rows), of_user, of_rows)
        return run_mlp(dense_arch.model, split)

    def _dot_products(
        self, request: RequestRows, dense_vector: Tensor, user: Tensor, rows: Tensor
    ) -> SplitInput:
        """Return the top MLP's input: the dense vector and the dot products of all pairs."""
        vectors = torch.cat([request.expand(user), rows], dim=1)
        products = torch.bmm(rows, vectors.transpose(1, 2)).flatten(1)
        of_user, of_rows = [], [products.index_select(1, self._row_pairs)]
        if len(self._user_pairs):
            products = torch.bmm(user, user.transpose(1, 2)).flatten(1)
            of_user.append(products.index_select(1, self._user_pairs))
        (of_user if self._dense_of_user else of_rows).insert(0, dense_vector)
        first = torch.cat(of_user, dim=1) if of_user else user.new_empty(len(user), 0)
        columns = self._user_columns, self._row_columns
        return SplitInput(request, first, torch.cat(of_rows, dim=1), *columns)


def _crossed(crossnet: Any, x_0: Tensor, split: SplitInput) -> Tensor:
    """Return the output of a TorchRec cross network for ``x_0``, ``[B, K]``.

    ``split`` has the same values as ``x_0``. Only the first product is computed once per request
    row, because later layers mix both sides.
    """
    low_rank, vector = (isinstance(crossnet, kind) for kind in (LowRankCrossNet, VectorCrossNet))
    x = x_0
    for n in range(crossnet._num_layers):
        weight = crossnet.V_kernels[n] if low_rank else crossnet.kernels[n]
        weight = weight.t() if vector else weight
        product = F.linear(x, weight) if n else split.linear(weight)
        if low_rank:
            product = F.linear(product, crossnet.W_kernels[n])
        bias = crossnet.bias[n].flatten()
        x = x_0 * product + bias + x if vector else x_0 * (product + bias) + x
    return x


class _TakeSides(torch.autograd.Function):
    """Splits ``[B, F, D]`` into user vectors ``[U, F_user, D]`` and the rest ``[B, F_rows, D]``."""

    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, first_rows: Tensor, of_user: Tensor, of_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(first_rows, of_user, of_rows)
        ctx.shape = vectors.shape
        user = vectors.index_select(0, first_rows).index_select(1, of_user)
        return user, vectors.index_select(1, of_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, user: Tensor, rows: Tensor) -> tuple[Tensor | None, ...]:
        first_rows, of_user, of_rows = ctx.saved_tensors
        gradient = rows.new_zeros(ctx.shape).index_copy_(1, of_rows, rows)
        # Padded request rows repeat the first row. Their gradients are zero.
        gradient.index_put_((first_rows.unsqueeze(1), of_user), user, accumulate=True)
        return gradient, None, None, None


def _cat(vectors: Sequence[Tensor], num_rows: int, like: Tensor) -> Tensor:
    """Concatenate tensors ``[num_rows, F, D]`` on dim 1. Without tensors, F of the result is 0."""
    return torch.cat([*vectors], 1) if vectors else like.new_empty(num_rows, 0, like.shape[1])


def _pairs(column: Tensor, num_user: int = 0) -> tuple[Tensor, Tensor]:
    """Return the positions of pairs in the flattened products, and the ``column`` of each pair.

    ``column`` is ``[F, num_user + F]``: F vectors are multiplied by ``num_user`` other vectors and
    by each other. Each pair is returned once.
    """
    once = torch.ones_like(column, dtype=torch.bool)
    once[:, num_user:] = once[:, num_user:].triu(1)
    return once.flatten().nonzero().flatten(), column[once]
