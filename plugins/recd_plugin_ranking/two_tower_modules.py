"""Modules of ``ranking.two_tower``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from recd_plugin_ranking.ops import ids_of_rows, weighted_mean
from recd_plugins.api import SequencePooling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recd_plugin_ranking.options import TwoTowerOptions
    from recd_plugins.api import ModelFeatures, ModelInput

Output = tuple[Tensor, tuple[Tensor, Tensor, Tensor]]


class TwoTowerModule(nn.Module):
    """Two-tower model with one embedding table per feature."""

    def __init__(
        self,
        options: TwoTowerOptions,
        features: tuple[Sequence[str], Sequence[str]],
        made_from: ModelFeatures,
        share: NDArray[np.float32] | None,
    ) -> None:
        super().__init__()
        self.item_feature = options.item[0]
        known = {*features[0], *features[1]}
        copies = [
            name for name in made_from.pooled if name in known and made_from.replicates(f"t_{name}")
        ]
        pooled = [name for name in made_from.pooled if name in known and name not in copies]
        self.bags = _tables(EmbeddingBagCollection, EmbeddingBagConfig, options, pooled)
        self.replicated_bags = _tables(EmbeddingBagCollection, EmbeddingBagConfig, options, copies)
        sequence = [name for name in made_from.sequence if name in known]
        self.sequences = _tables(EmbeddingCollection, EmbeddingConfig, options, sequence)
        self.pooling = SequencePooling(sequence, options.embedding_dim) if sequence else None
        self.top = Top(options, features, sequence, share)

    def forward(self, batch: ModelInput) -> Output:
        output: Output = self.top(*self._looked_up(batch), batch)
        return output

    def user_vectors(self, batch: ModelInput) -> Tensor:
        """Return user vectors ``[B, D]``; their dot products with item vectors are logits."""
        return self.top.towers(*self._looked_up(batch), batch)[0]

    def item_vectors(self, batch: ModelInput) -> Tensor:
        """Return the vector of each row's item, ``[B, D]``."""
        return self.top.towers(*self._looked_up(batch), batch)[1]

    def _looked_up(self, batch: ModelInput) -> tuple[Any, Any, Any]:
        bags = self.bags(batch.sparse_features) if self.bags is not None else None
        copies = None
        if self.replicated_bags is not None:
            copies = self.replicated_bags(batch.replicated_features)
        pooled = None
        if self.sequences is not None and self.pooling is not None:
            pooled = self.pooling(self.sequences(batch.sequence_features), batch)
        return bags, copies, pooled


class Top(nn.Module):
    """User tower, item tower and loss of the two-tower model, applied after embedding lookup."""

    share: Tensor | None

    def __init__(
        self,
        options: TwoTowerOptions,
        features: tuple[Sequence[str], Sequence[str]],
        sequence: Sequence[str],
        share: NDArray[np.float32] | None,
    ) -> None:
        super().__init__()
        self._options, self._sequence = options, sequence
        self._features = features
        dense = options.user_dense, options.item_dense
        self._dense = dense
        self.user, self.item = (
            _tower(len(numbers) + options.embedding_dim * len(names), options)
            for names, numbers in zip(features, dense, strict=True)
        )
        self.register_buffer("share", None if share is None else torch.from_numpy(share))

    def forward(
        self,
        bags: KeyedTensor | None,
        copies: KeyedTensor | None,
        pooled: Tensor | None,
        batch: ModelInput,
    ) -> Output:
        users, items = self.towers(bags, copies, pooled, batch)
        logits = (users * items).sum(1)
        if torch.compiler.is_exporting():  # rows without labels are only scored
            loss = logits.new_zeros(())
        elif self._options.loss == "binary":
            loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        else:
            loss = self._in_batch(users, items, batch)
        return loss, (loss.detach(), logits.detach(), batch.labels)

    def towers(
        self,
        bags: KeyedTensor | None,
        copies: KeyedTensor | None,
        pooled: Tensor | None,
        batch: ModelInput,
    ) -> tuple[Tensor, Tensor]:
        """Return user vectors (divided by the temperature) and item vectors, each ``[B, D]``."""
        vectors: dict[str, Tensor] = {}
        for found in (bags, copies):
            if found is not None:
                vectors |= found.to_dict()
        if pooled is not None:
            vectors |= zip(self._sequence, pooled.unbind(1), strict=True)
        towers = []
        modules = self.user, self.item
        for module, names, dense in zip(modules, self._features, self._dense, strict=True):
            columns = [vectors[name] for name in names]
            vector = module(torch.cat([*columns, batch.dense_features[:, list(dense)]], 1))
            towers.append(F.normalize(vector, dim=1) if self._options.normalize else vector)
        return towers[0] / self._options.temperature, towers[1]

    def _in_batch(self, users: Tensor, items: Tensor, batch: ModelInput) -> Tensor:
        """Return the loss of predicting each positive row's item among all positive rows' items."""
        ids = ids_of_rows(batch, self._options.item[0])
        positive = (batch.labels > 0.5) & (ids >= 0)
        same = self._same_user(batch, positive)
        ids, logits = ids[positive], users[positive] @ items[positive].T
        own = logits.diagonal()
        if self.share is not None:
            own, logits = own - self.share[ids].log(), logits - self.share[ids].log()
        same = same | (ids == ids.unsqueeze(1))
        logits = logits.masked_fill(same, -torch.inf)
        losses = torch.cat([own.unsqueeze(1), logits], 1).logsumexp(1) - own
        return weighted_mean(losses, torch.ones_like(losses)) + 0 * (users.sum() + items.sum())

    def _same_user(self, batch: ModelInput, rows: Tensor) -> Tensor:
        """Return which pairs of the given rows have the same user, bool ``[N, N]`` or a scalar."""
        if not self._options.mask_same_user or not self._options.user:
            return torch.zeros((), dtype=torch.bool, device=rows.device)
        users = ids_of_rows(batch, self._options.user[0])[rows]
        return (users == users.unsqueeze(1)) & (users >= 0)


def _tables(collection: Any, config: Any, options: TwoTowerOptions, names: Sequence[str]) -> Any:
    if not names:
        return None
    tables = [
        config(
            name=f"t_{name}",
            feature_names=[name],
            embedding_dim=options.embedding_dim,
            num_embeddings=options.rows_of(name),
        )
        for name in names
    ]
    return collection(tables=tables)


def _tower(width: int, options: TwoTowerOptions) -> nn.Module:
    layers: list[nn.Module] = []
    for size in options.hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, options.embedding_dim))
