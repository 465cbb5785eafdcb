"""Modules of ``ranking.sasrec``: encoder, resumable dropout, and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugin_ranking.ops import (
    Candidates,
    expanded,
    full_losses,
    ids_of_rows,
    log_of_presence,
    losses_among,
    padded_last,
    weighted_mean,
)
from recd_plugins.api import jagged

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recd_plugin_ranking.options import SasRecOptions
    from recd_plugins.api import ModelInput


# Odd numbers that keep the random streams of steps and seeds far apart.
_STRIDE, _SEED_STRIDE = 0x4F1BBCDCBFA53E0B, 0x1E3779B97F4A7C15


class SteadyDraws(nn.Module):
    """Creates a random generator per step, with the same seed on every rank.

    The step is a buffer, so checkpoints contain it and a resumed run repeats the same numbers.
    """

    def __init__(self, stream: int) -> None:
        super().__init__()
        self._stream = stream
        self.step: Tensor
        first = torch.initial_seed() * _SEED_STRIDE % (1 << 62)
        self.register_buffer("step", torch.tensor(first, dtype=torch.int64))

    def next(self, device: torch.device) -> torch.Generator:
        """Return the generator of the current step, and advance the step in training mode."""
        generator = torch.Generator(device)
        generator.manual_seed((int(self.step) * _STRIDE + self._stream) % (1 << 63))
        if self.training:
            self.step += 1
        return generator


class SteadyDropout(nn.Module):
    """Dropout with masks seeded by step: equal on all ranks and after a resume."""

    def __init__(self, rate: float, stream: int) -> None:
        super().__init__()
        self._rate = rate
        self._draws = SteadyDraws(stream)

    def forward(self, values: Tensor) -> Tensor:
        if not (self.training and self._rate):
            return values
        generator = self._draws.next(values.device)
        drawn = torch.rand(values.shape, device=values.device, generator=generator)
        return values * (drawn >= self._rate) / (1 - self._rate)


class EncoderLayer(nn.Module):
    """Causal transformer layer with pre-layer normalization."""

    def __init__(self, dim: int, heads: int, dropout: float, stream: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.in_projection = nn.Linear(dim, 3 * dim)
        self.out_projection = nn.Linear(dim, dim)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, 4 * dim)
        self.contract = nn.Linear(4 * dim, dim)
        self.dropouts = nn.ModuleList(SteadyDropout(dropout, stream + i) for i in range(2))

    def forward(self, places: Tensor) -> Tensor:
        """Encode padded sequences ``[rows, length, D]`` to the same shape."""
        rows, length, dim = places.shape
        after_norm = self.in_projection(self.attention_norm(places))
        shape = (rows, length, 3, self.heads, dim // self.heads)
        query, key, value = (each.transpose(1, 2) for each in after_norm.view(shape).unbind(2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = self.out_projection(attended.transpose(1, 2).reshape(rows, length, dim))
        places = places + self.dropouts[0](attended)
        hidden = F.gelu(self.expand(self.feed_forward_norm(places)))
        return places + self.dropouts[1](self.contract(hidden))


class HistoryEncoder(nn.Module):
    """Encodes each prefix of an item history to a vector that predicts the next item."""

    def __init__(self, dim: int, layers: int, heads: int, most: int, dropout: float) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(dim))
        self.places = nn.Parameter(torch.zeros(most + 1, dim))
        nn.init.normal_(self.places, std=0.02)
        self.norm = nn.LayerNorm(dim)
        self.dropout = SteadyDropout(dropout, 1000)
        self.layers = nn.ModuleList(
            EncoderLayer(dim, heads, dropout, 1001 + 2 * number) for number in range(layers)
        )
        self.last_norm = nn.LayerNorm(dim)

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        """Encode padded histories ``[rows, L, D]`` causally to ``[rows, L + 1, D]``."""
        rows, longest, dim = items.shape
        start = self.start.expand(rows, 1, dim)
        places = torch.arange(longest + 1, device=items.device)
        from_last = (lengths.unsqueeze(1) - places).clamp(min=0)
        vectors = torch.cat([start, items], dim=1) + self.places[from_last]
        vectors = self.dropout(self.norm(vectors))
        for layer in self.layers:
            vectors = layer(vectors)
        encoded: Tensor = self.last_norm(vectors)
        return encoded


Embeddings = dict[str, JaggedTensor]
Output = tuple[Tensor, tuple[Tensor, Tensor, Tensor]]


class SasRecModule(nn.Module):
    """SASRec module: an embedding table for items and histories, followed by ``Top``."""

    def __init__(self, options: SasRecOptions, share: NDArray[np.float32] | None) -> None:
        super().__init__()
        self.item_feature = options.item
        self.items = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=f"t_{options.item}",
                    feature_names=[options.history, options.item],
                    embedding_dim=options.embedding_dim,
                    num_embeddings=options.num_embeddings,
                )
            ]
        )
        self.top = Top(options, share)

    def forward(self, batch: ModelInput) -> Output:
        output: Output = self.top(self.items(batch.sequence_features), batch)
        return output

    def user_vectors(self, batch: ModelInput) -> Tensor:
        """Return user vectors ``[B, D]``; their dot products with item vectors are logits."""
        return self.top.encoded(self.items(batch.sequence_features), batch)[2]

    def item_vectors(self, batch: ModelInput) -> Tensor:
        """Return the vector of each row's item, ``[B, D]``."""
        return self.top.item_vectors(self.items(batch.sequence_features), batch)


class Top(nn.Module):
    """Encodes deduplicated histories, scores items and computes the loss of SASRec."""

    share: Tensor | None

    def __init__(self, options: SasRecOptions, share: NDArray[np.float32] | None) -> None:
        super().__init__()
        self._options = options
        dim = options.embedding_dim
        self.encoder = HistoryEncoder(
            dim, options.layers, options.heads, options.max_length, options.dropout
        )
        self.draws = SteadyDraws(1)
        self.output: nn.Linear | None = None
        if options.loss == "softmax":
            self.output = nn.Linear(dim, options.num_embeddings, bias=False)
            nn.init.normal_(self.output.weight, std=0.02)
        self.register_buffer("share", None if share is None else torch.from_numpy(share))

    def forward(self, embeddings: Embeddings, batch: ModelInput) -> Output:
        history, encoded, users = self.encoded(embeddings, batch)
        items = self.item_vectors(embeddings, batch)
        logits = (users * items).sum(1)
        if torch.compiler.is_exporting():  # rows without labels are only scored
            loss = logits.new_zeros(())
        elif self._options.loss == "binary":
            loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        else:
            loss = self._softmax(embeddings, batch, history, encoded, users)
        return loss, (loss.detach(), logits.detach(), batch.labels)

    def item_vectors(self, embeddings: Embeddings, batch: ModelInput) -> Tensor:
        name, temperature = self._options.item, self._options.temperature
        if self.output is None:
            return self._item_rows(embeddings, batch) / temperature
        ids = ids_of_rows(batch, name)
        there = (ids >= 0).unsqueeze(1)
        return self.output.weight.index_select(0, ids.clamp(min=0)) * there / temperature

    def _item_rows(self, embeddings: Embeddings, batch: ModelInput) -> Tensor:
        """Return the embedding of each row's item, ``[B, D]``."""
        name = self._options.item
        rows = batch.unique_rows(name, embeddings[name])
        sums = jagged.row_sums(rows.values(), rows.lengths())
        return expanded(sums, batch.inverse_lookup.get(name))

    def encoded(self, embeddings: Embeddings, batch: ModelInput) -> tuple[Tensor, Tensor, Tensor]:
        """Encode deduplicated histories.

        Returns:
            Their padded vectors ``[U, L, D]``, the encodings ``[U, L + 1, D]``, and the user vector
            of each row, ``[B, D]``.
        """
        options = self._options
        rows = batch.unique_rows(options.history, embeddings[options.history])
        fill = rows.values().new_zeros(1, options.embedding_dim)
        history, lengths = padded_last(rows, options.max_length, fill)
        encoded = self.encoder(history, lengths)
        last = encoded[torch.arange(lengths.shape[0], device=lengths.device), lengths]
        return history, encoded, expanded(last, batch.inverse_lookup.get(options.history))

    def _softmax(
        self,
        embeddings: Embeddings,
        batch: ModelInput,
        history: Tensor,
        encoded: Tensor,
        users: Tensor,
    ) -> Tensor:
        """Return the loss of predicting the items of positive rows and of their histories."""
        options = self._options
        targets = ids_of_rows(batch, options.item)
        positive = (batch.labels > 0.5) & (targets >= 0)
        # Weight each history by its number of positive rows, as without deduplication.
        inverse = batch.inverse_lookup.get(options.history)
        times = positive.to(users.dtype)
        if inverse is not None:
            times = times.new_zeros(len(encoded)).index_add(0, inverse, times)
        assert batch.sequence_features is not None, "the model looks up a sequence"
        name = options.history
        history_ids = batch.unique_rows(name, batch.sequence_features[name])
        nothing = history_ids.values().new_full((1,), -1)
        places, _ = padded_last(history_ids, options.max_length, nothing)
        inner = (places >= 0) & (times > 0).unsqueeze(1)
        if options.targets == "last":
            inner = torch.zeros_like(inner)
        queries = torch.cat([encoded[:, :-1][inner], users[positive]])
        ids = torch.cat([places[inner], targets[positive]])
        weights = torch.cat(
            [times.unsqueeze(1).expand_as(inner)[inner], positive.to(users.dtype)[positive]]
        )
        if self.output is not None:
            logits = self.output(queries) / options.temperature
            return weighted_mean(full_losses(logits, ids), weights) + 0 * users.sum()
        vectors = torch.cat([history[inner], self._item_rows(embeddings, batch)[positive]])
        candidates = Candidates.of(
            ids, vectors, options.most_candidates, self.draws.next(users.device)
        )
        correction = None
        if self.share is not None:
            correction = log_of_presence(self.share, weights.sum())
        losses = losses_among(candidates, queries, ids, vectors, correction, options.temperature)
        return weighted_mean(losses, weights) + 0 * users.sum()
