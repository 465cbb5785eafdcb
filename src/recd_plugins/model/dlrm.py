"""The built-in DLRM and DCN models, and their feature interactions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.models.dlrm import DenseArch, OverArch
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, VectorCrossNet
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recd_plugins.config.run_config import num_embeddings
from recd_plugins.config.schema import ModelSpec
from recd_plugins.interfaces.batch import ModelInput, Placement
from recd_plugins.interfaces.model_tables import table_name
from recd_plugins.interfaces.tasks import Task, total_loss
from recd_plugins.model.cuda_graph import GraphedLoss
from recd_plugins.model.multi_task import MultiTaskArch, num_first_layers
from recd_plugins.model.sequence_pooling import PooledSides, SequencePooling
from recd_plugins.model.user_split import RequestRowsOfBatch, UserSplit
from recd_plugins.sparse.request_rows import RequestRows


class DotInteraction(nn.Module):
    """The DLRM interaction (arXiv 1906.00091, section 2.1): dot products of all pairs of n vectors.

    Computes the same values as TorchRec's InteractionArch, with an index select instead of advanced
    indexing. With 100 vectors, the backward pass of advanced indexing takes longer than the
    products. The n vectors ``[dim]`` include the vector of the dense features. ``out_features`` is
    ``dim + n * (n - 1) / 2``.
    """

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__()
        rows, columns = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        self.pairs: Tensor
        self.out_features = dim + len(rows)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Map ``dense`` ``[B, dim]`` and ``vectors`` ``[B, n, dim]`` to ``[B, out_features]``."""
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([dense, products.flatten(1).index_select(1, self.pairs)], dim=1)


class CrossInteraction(nn.Module):
    """A cross network over the concatenated vectors, like TorchRec's InteractionDCNArch.

    Implements the stacked form of DCN-v2 (arXiv 2008.13535): the top MLP follows the cross network.
    With vectors as weights instead of matrices, the cross layers are those of DCN (arXiv
    1708.05123). The n vectors include the vector of the dense features. ``out_features`` is ``n *
    dim``, the same as the number of inputs.
    """

    def __init__(self, spec: ModelSpec, num_vectors: int) -> None:
        super().__init__()
        self.out_features = num_vectors * spec.embedding_dim
        if spec.cross_net == "full":
            self.crossnet: nn.Module = CrossNet(self.out_features, spec.cross_layers)
        elif spec.cross_net == "vector":
            self.crossnet = VectorCrossNet(self.out_features, spec.cross_layers)
        else:
            # A quarter keeps about the accuracy of square matrices, says TorchRec's documentation.
            rank = spec.low_rank_dim or max(1, self.out_features // 4)
            self.crossnet = LowRankCrossNet(self.out_features, spec.cross_layers, rank)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:  # noqa: ARG002
        """Map ``vectors`` ``[B, n, dim]``, which include ``dense``, to ``[B, n * dim]``."""
        crossed: Tensor = self.crossnet(vectors.flatten(1))
        return crossed


def interaction_of(spec: ModelSpec, num_vectors: int) -> DotInteraction | CrossInteraction:
    """Build the feature interaction set by ``spec.architecture``, for ``num_vectors`` vectors."""
    if spec.architecture == "dcn":
        return CrossInteraction(spec, num_vectors)
    return DotInteraction(num_vectors, spec.embedding_dim)


Output = tuple[Tensor, Tensor, Tensor]


class DLRM(nn.Module):
    """The built-in model: bottom MLP, embeddings, feature interaction, top MLP and loss.

    ``spec.architecture`` selects the interaction: dot products or DCN's cross network. One
    EmbeddingBagCollection looks up pooled features, and a second one looks up features of
    replicated tables. An EmbeddingCollection looks up sequence features, which are pooled over
    unique rows.

    Args:
        spec: architecture and sizes.
        num_dense: number of dense features; with 0, the model has no bottom MLP.
        placement: groups the sparse features according to their lookup and pooling.
        bag_order: order of pooled and replicated features, both in the interaction and for drawing
            initial weights. Default: pooled features first. With a fixed order, the model does not
            depend on which tables are replicated.
        cuda_graphs: replay the layers after the embeddings as CUDA graphs in training.
        tasks: tasks of multi-task training; empty for one label.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_dense: int,
        placement: Placement,
        bag_order: Sequence[str] | None = None,
        cuda_graphs: bool = True,
        tasks: Sequence[Task] = (),
    ) -> None:
        super().__init__()
        self.placement = placement
        bag_order = bag_order or placement.pooled + placement.replicated
        drawn = _bags(spec, bag_order)
        with torch.random.fork_rng([]):
            self.bags = _some_of(drawn, spec, placement.pooled)
            self.replicated_bags = _some_of(drawn, spec, placement.replicated)
        self.sequences: EmbeddingCollection | None = None
        self.sequence_pooling: SequencePooling | None = None
        if names := placement.sequence:
            configs = [EmbeddingConfig(**each) for each in _tables(spec, names)]
            self.sequences = EmbeddingCollection(tables=configs)
            self.sequence_pooling = SequencePooling(names, spec.embedding_dim, spec.pool_rows)
        features = placement.pooled + placement.replicated + placement.sequence
        split = spec.user_rows == "unique" and (spec.architecture == "dcn" or spec.top_mlp)
        self.request_rows = RequestRowsOfBatch(
            spec, features if split else (), num_dense, num_first_layers(spec, len(tasks))
        )
        self.top = _Top(spec, num_dense, placement, bag_order, tasks)
        self.top.graphed = GraphedLoss() if cuda_graphs else None

    def start_at(self, mean: float) -> None:
        """Set the last bias so that initial predictions are about ``mean``, in (0, 1)."""
        assert isinstance(self.top.over_arch, OverArch)
        nn.init.constant_(self.top.over_arch.model[-1].bias, math.log(mean / (1 - mean)))

    def start_tasks_at(self, means: Mapping[str, float]) -> None:
        """Set the last bias of each task to its constant prediction of ``Dataset.task_means``."""
        assert isinstance(self.top.over_arch, MultiTaskArch)
        self.top.over_arch.start_at(means)

    def forward(self, batch: ModelInput) -> tuple[Tensor, Output]:
        """Return the scalar mean loss and detached (loss, logits, labels).

        Logits and labels are ``[B]``, or ``[B, T]`` with T tasks.
        """
        bags = None if self.bags is None else self.bags(batch.sparse_features)
        replicated = (
            None
            if self.replicated_bags is None
            else self.replicated_bags(batch.replicated_features)
        )
        request = self.request_rows(batch)
        pooled = None
        if self.sequences is not None and self.sequence_pooling is not None:
            embeddings: dict[str, JaggedTensor] = self.sequences(batch.sequence_features)
            targets = {
                name: tensor[name]
                for features, tensor in (
                    (self.placement.pooled, bags),
                    (self.placement.replicated, replicated),
                )
                for name in self.sequence_pooling.targets
                if name in features and tensor is not None
            }
            pooled = self.sequence_pooling(embeddings, batch, targets, request)
        loss, logits = self.top(
            batch.dense_features, batch.labels, bags, replicated, pooled, request
        )
        return loss, (loss.detach(), logits, batch.labels)


class _Top(nn.Module):
    """Contains all layers after the embeddings, so that FX tracing can treat them as a leaf."""

    graphed: GraphedLoss | None = None

    def __init__(
        self,
        spec: ModelSpec,
        num_dense: int,
        placement: Placement,
        bag_order: Sequence[str],
        tasks: Sequence[Task],
    ) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        self.placement = placement
        position = {name: i for i, name in enumerate(placement.pooled + placement.replicated)}
        self.register_buffer(
            "bag_order", torch.tensor([position[name] for name in bag_order]), persistent=False
        )
        self.bag_order: Tensor
        dim = spec.embedding_dim
        num_sparse = len(placement.pooled + placement.replicated + placement.sequence)
        self.dense_arch = DenseArch(num_dense, [*spec.bottom_mlp, dim]) if num_dense else None
        # Without dense features, a learned vector replaces the output of the bottom MLP.
        self.bias = None if num_dense else nn.Parameter(torch.zeros(dim))
        self.interaction = interaction_of(spec, num_sparse + 1)
        self.over_arch = (
            MultiTaskArch(spec, self.interaction.out_features, tasks)
            if tasks
            else OverArch(self.interaction.out_features, [*spec.top_mlp, 1])
        )
        self._sizes = (*bag_order, *placement.sequence), num_dense, dim
        self._splits: dict[object, UserSplit] = {}

    def forward(
        self,
        dense: Tensor,
        labels: Tensor,
        bags: KeyedTensor | None,
        replicated: KeyedTensor | None,
        pooled: Tensor | PooledSides | None,
        request: RequestRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scalar mean loss and the detached logits, ``[B]`` or ``[B, T]``.

        With ``request``, user layers are computed once per request row.
        """
        if request is not None:
            assert not isinstance(pooled, Tensor)
            return self._split(dense, labels, (bags, replicated), pooled, request)
        assert not isinstance(pooled, PooledSides)
        vectors = []
        if bags is not None:
            vectors.append(_in_order(bags, self.placement.pooled))
        if replicated is not None:
            vectors.append(_in_order(replicated, self.placement.replicated))
        if pooled is not None:
            vectors.append(pooled)
        if self.graphed is None or not self.training:
            return self._loss(dense, labels, *vectors)
        return self.graphed(self, self._loss, dense, labels, *vectors)

    def _loss(self, dense: Tensor, labels: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        if self.dense_arch is not None:
            dense_vector = self.dense_arch(dense)
        else:
            assert self.bias is not None
            dense_vector = self.bias.expand(dense.shape[0], -1)
        bags = [*vectors]
        if self.placement.pooled and self.placement.replicated:
            bags[:2] = [torch.cat(bags[:2], dim=1).index_select(1, self.bag_order)]
        interactions = self.interaction(
            dense_vector, torch.cat([dense_vector.unsqueeze(1), *bags], dim=1)
        )
        return self._loss_of(self.over_arch(interactions), labels)

    def _loss_of(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.tasks:
            return total_loss(self.tasks, logits, labels), logits.detach()
        logits = logits.squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels), logits.detach()

    def _split(
        self,
        dense: Tensor,
        labels: Tensor,
        tables: Sequence[KeyedTensor | None],
        pooled: PooledSides | None,
        request: RequestRows,
    ) -> tuple[Tensor, Tensor]:
        bags = [each for each in tables if each is not None]
        columns = request.features, request.dense_columns
        key = (*(tuple(each.keys()) for each in bags), *columns, dense.device)
        split = self._splits.get(key)
        if split is None:
            split = self._splits[key] = UserSplit(*self._sizes, request, bags, pooled)
        user, rows = split.vectors(request, bags, pooled)
        layers = partial(self._split_loss, split, len(user))
        inputs = dense, labels, request.inverse, request.first_rows, *user, *rows
        if self.graphed is None or not self.training:
            return layers(*inputs)
        return split.graphed(self, layers, *inputs)

    def _split_loss(
        self,
        split: UserSplit,
        num_user: int,
        dense: Tensor,
        labels: Tensor,
        inverse: Tensor,
        first_rows: Tensor,
        *vectors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        request = RequestRows(inverse, first_rows, ())
        crossnet = getattr(self.interaction, "crossnet", None)
        dense_arch = self.dense_arch if self.bias is None else self.bias
        user, rows = vectors[:num_user], vectors[num_user:]
        logits = split.logits(request, dense, user, rows, dense_arch, crossnet, self.over_arch)
        return self._loss_of(logits, labels)


def _in_order(tensor: KeyedTensor, features: Sequence[str]) -> Tensor:
    """Return the vectors of ``features``, ``[B, num_features, dim]``."""
    # The order of the values depends on the sharding plan. Slicing each feature separately would
    # allocate a gradient of the full size per feature.
    keys = tensor.keys()
    vectors = tensor.values().unflatten(1, (len(keys), -1))
    if keys == list(features):
        return vectors
    position = {key: index for index, key in enumerate(keys)}
    order = torch.tensor([position[feature] for feature in features], device=vectors.device)
    return vectors.index_select(1, order)


def _bags(spec: ModelSpec, features: Sequence[str]) -> EmbeddingBagCollection | None:
    if not features:
        return None
    pooling = PoolingType[spec.bag_pooling.upper()]
    return EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(**each, pooling=pooling) for each in _tables(spec, features)]
    )


def _some_of(
    bags: EmbeddingBagCollection | None, spec: ModelSpec, features: Sequence[str]
) -> EmbeddingBagCollection | None:
    """Return ``bags`` with only the tables that ``features`` use; None without features."""
    if bags is None or len(features) == len(bags.embedding_bags):
        return bags if features else None
    some = _bags(spec, features)
    if some is not None:
        for name in some.embedding_bags:
            some.embedding_bags[name] = bags.embedding_bags[name]
    return some


def _tables(spec: ModelSpec, features: Sequence[str]) -> list[dict[str, Any]]:
    rows = num_embeddings(spec, features)
    return [
        {
            "name": table_name(feature),
            "embedding_dim": spec.embedding_dim,
            "num_embeddings": rows[feature],
            "feature_names": [feature],
        }
        for feature in features
    ]
