"""Self-attention over histories: each place sees itself and what is before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recd_plugin_ranking.steady_draws import SteadyDropout


class EncoderLayer(nn.Module):
    """One layer, norm in front of each half."""

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
        """``[rows, places, D]``, where a row is filled up at its end."""
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
    """Vectors of what a user does next, after nothing, after the first item, and so on.

    Args:
        dim: of items and of results.
        layers, heads: of the encoder.
        most: places of a history, counted from its last item, that have a vector of their own.
        dropout: share of values.
    """

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
        """``[rows, L, D]``, of each row the first ``lengths``, to ``[rows, L + 1, D]``.

        Results at a place see the items before it; behind ``lengths`` they mean nothing.
        """
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
