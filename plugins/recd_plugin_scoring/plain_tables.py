"""Tables in one piece, in place of TorchRec's modules, for a model that leaves recd-plugins.

They take a feature as its stored rows, and which of them each row of the batch is: that is how a
request sends a history once for all of its candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recd_plugin_scoring.int8_rows import Int8Rows
from recd_plugins.api import RecdError


@dataclass(frozen=True)
class StoredRows:
    """A feature's stored rows, which a model reads as a JaggedTensor; and the one of each row.

    Attributes:
        ids: of stored rows, int64 ``[num_values]``.
        counts: ids of each stored row, int64 ``[num_stored]``.
        rows: the stored row of each row, int64 ``[B]``.
    """

    ids: Tensor
    counts: Tensor
    rows: Tensor

    def values(self) -> Tensor:
        return self.ids

    def lengths(self) -> Tensor:
        return self.counts


class PlainBags(nn.Module):
    """What an EmbeddingBagCollection does, over stored rows."""

    def __init__(self, bags: EmbeddingBagCollection, int8: bool) -> None:
        super().__init__()
        if bags.is_weighted():
            raise RecdError("tables of weighted features cannot be exported")
        self.modes = [config.pooling for config in bags.embedding_bag_configs()]
        self.outputs = list(_outputs(bags.embedding_bag_configs()))
        self.lengths = [config.embedding_dim for config in bags.embedding_bag_configs()]
        self.tables = nn.ModuleList(
            _table(bags.embedding_bags[config.name].weight, int8)
            for config in bags.embedding_bag_configs()
        )

    def forward(self, features: Mapping[str, StoredRows]) -> KeyedTensor:
        vectors = []
        for table, feature, _ in self.outputs:
            stored = features[feature]
            looked_up = self.tables[table](stored.ids)
            pooled = _sums(looked_up, stored.counts)
            if self.modes[table] == PoolingType.MEAN:
                pooled = pooled / stored.counts.clamp(min=1).unsqueeze(1)
            vectors.append(pooled.index_select(0, stored.rows))
        return KeyedTensor(
            keys=[name for *_, name in self.outputs],
            length_per_key=[self.lengths[table] for table, *_ in self.outputs],
            values=torch.cat(vectors, dim=1),
        )


class PlainSequences(nn.Module):
    """What an EmbeddingCollection does, over stored rows."""

    def __init__(self, sequences: EmbeddingCollection, int8: bool) -> None:
        super().__init__()
        self.outputs = list(_outputs(sequences.embedding_configs()))
        self.tables = nn.ModuleList(
            _table(sequences.embeddings[config.name].weight, int8)
            for config in sequences.embedding_configs()
        )

    def forward(self, features: Mapping[str, StoredRows]) -> dict[str, JaggedTensor]:
        return {
            name: JaggedTensor(
                self.tables[table](features[feature].ids), lengths=features[feature].counts
            )
            for table, feature, name in self.outputs
        }


class _Rows(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


def with_plain_tables(model: nn.Module, *, int8: bool = False) -> nn.Module:
    """The model with such tables in place of TorchRec's; it is changed in place."""
    for name, module in list(model.named_children()):
        if isinstance(module, EmbeddingBagCollection):
            setattr(model, name, PlainBags(module, int8))
        elif isinstance(module, EmbeddingCollection):
            setattr(model, name, PlainSequences(module, int8))
        else:
            with_plain_tables(module, int8=int8)
    return model


def _table(weight: Tensor, int8: bool) -> nn.Module:
    return Int8Rows(weight) if int8 else _Rows(weight)


def _outputs(configs: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """Table, feature and name of each output, as TorchRec names them."""
    seen = Counter(feature for config in configs for feature in config.feature_names)
    for index, config in enumerate(configs):
        if config.data_type != DataType.FP32:
            raise RecdError(f"table {config.name} is {config.data_type}; only FP32 is exported")
        for feature in config.feature_names:
            yield index, feature, feature if seen[feature] == 1 else f"{feature}@{config.name}"


def _sums(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Of the vectors of each row, ``[num_rows, dim]``."""
    row = torch.repeat_interleave(lengths, output_size=vectors.shape[0])
    return vectors.new_zeros(lengths.shape[0], vectors.shape[1]).index_add(0, row, vectors)
