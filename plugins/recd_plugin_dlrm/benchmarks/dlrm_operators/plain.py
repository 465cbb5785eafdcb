"""The same model written with torch.nn alone, as who knows no TorchRec would write it well."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from recd_plugin_dlrm.benchmarks.dlrm_operators.configuration import FEATURES, NUM_DENSE
from recd_plugins.api.model import DLRM, CrossInteraction, table_name
from recd_plugins.api.registry import ModelSpec


class PlainModel(nn.Module):
    """An EmbeddingBag with sparse gradients a table, Linear layers, and the interaction.

    Args:
        spec: architecture and sizes.
        model: whose weights it starts from. Its tables are shared, all else is copied.
    """

    def __init__(self, spec: ModelSpec, model: DLRM) -> None:
        super().__init__()
        assert model.bags is not None, "the model has pooled features"
        bags = model.bags.embedding_bags
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                bags[table_name(feature)].weight.detach(),
                freeze=False,
                mode="sum",
                sparse=True,
                include_last_offset=True,
            )
            for feature in FEATURES
        )
        dim, num_vectors = spec.embedding_dim, len(FEATURES) + 1
        self.bottom = _mlp([NUM_DENSE, *spec.bottom_mlp, dim])
        interaction = model.top.interaction
        self.interaction: nn.Module
        if isinstance(interaction, CrossInteraction):
            self.interaction = _Cross(interaction.crossnet)
        else:
            self.interaction = _Dot(num_vectors)
        self.top = _mlp([interaction.out_features, *spec.top_mlp])
        self.last = nn.Linear(spec.top_mlp[-1], 1)
        ours = [module for module in model.top.modules() if isinstance(module, nn.Linear)]
        own = [*self.bottom, *self.top, self.last]
        theirs = [module for module in own if isinstance(module, nn.Linear)]
        for one, other in zip(theirs, ours, strict=True):
            one.load_state_dict(other.state_dict())

    def forward(self, dense: Tensor, ids: list[Tensor], offsets: list[Tensor]) -> Tensor:
        """Logits ``[B]``."""
        vector = self.bottom(dense)
        vectors = [vector, *(t(i, o) for t, i, o in zip(self.tables, ids, offsets, strict=True))]
        stacked = torch.cat(vectors, dim=1).view(len(dense), len(vectors), -1)
        logits: Tensor = self.last(self.top(self.interaction(vector, stacked)))
        return logits.squeeze(1)


class _Dot(nn.Module):
    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        rows, columns = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pairs", rows * num_vectors + columns)
        self.pairs: Tensor

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([dense, products.index_select(1, self.pairs)], dim=1)


class _Cross(nn.Module):
    """DCN-v2 with two thin matrices a layer, from TorchRec's weights."""

    def __init__(self, crossnet: nn.Module) -> None:
        super().__init__()
        weights = {name: p.detach() for name, p in crossnet.named_parameters()}
        layers = range(len([name for name in weights if name.startswith("bias.")]))
        self.down = nn.ModuleList(_linear(weights[f"V_kernels.{n}"]) for n in layers)
        self.up = nn.ModuleList(
            _linear(weights[f"W_kernels.{n}"], weights[f"bias.{n}"]) for n in layers
        )

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:  # noqa: ARG002
        first = crossed = vectors.flatten(1)
        for down, up in zip(self.down, self.up, strict=True):
            crossed = first * up(down(crossed)) + crossed
        return crossed


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return layer


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)
