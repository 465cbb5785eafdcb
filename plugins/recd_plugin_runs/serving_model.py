"""A trained model with its preprocessing as one module, from raw ids to probabilities."""

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

from recd_plugins.api import FeatureSchema, ModelInput, Preprocessing, RecdError


class ServingModel(nn.Module):
    """Scores rows whose features are stored once for many of them.

    Args:
        model: with plain tables; takes a ``ModelInput``.
        schema: features that it is given.
        steps: preprocessing of each feature, fitted.
    """

    def __init__(
        self, model: nn.Module, schema: FeatureSchema, steps: Mapping[str, Sequence[Preprocessing]]
    ) -> None:
        super().__init__()
        self.model = model
        self.schema = schema
        self.steps = steps

    def forward(
        self,
        dense: Tensor,
        values: dict[str, Tensor],
        lengths: dict[str, Tensor],
        rows: dict[str, Tensor],
    ) -> Tensor:
        """Probabilities, float32 ``[B]``.

        Args:
            dense: numbers of each row, float64 ``[B, num_dense]``, in the order of the schema.
            values: by sparse feature, raw ids of its stored rows, int64 ``[num_values]``.
            lengths: of those rows, int64 ``[num_stored]``.
            rows: the stored row of each row, int64 ``[B]``; 0 to B - 1 where none is shared.
        """
        features = {}
        for name in self.schema.sparse:
            ids, offsets = values[name], F.pad(lengths[name].cumsum(0), (1, 0))
            for step in self.steps.get(name, ()):
                ids, offsets = step.transform(ids, offsets)
            features[name] = StoredRows(ids, offsets.diff(), rows[name])
        dense = self._dense(dense).float()
        batch = ModelInput(
            dense_features=dense,
            sparse_features=features,
            labels=dense.new_zeros(dense.shape[0]),
            replicated_features=features,
            sequence_features=features,
            num_unique={name: each.counts.shape[0] for name, each in features.items()},
            inverse_lookup={name: each.rows for name, each in features.items()},
        )
        _, (_, logits, _) = self.model(batch)
        probabilities: Tensor = logits.sigmoid()
        return probabilities

    def _dense(self, dense: Tensor) -> Tensor:
        columns = []
        for index, name in enumerate(self.schema.dense):
            numbers = dense[:, index]
            offsets = torch.arange(dense.shape[0] + 1)
            for step in self.steps.get(name, ()):
                numbers, offsets = step.transform(numbers, offsets)
            columns.append(numbers.view(dense.shape[0], -1))
        return torch.cat(columns, dim=1) if columns else dense


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


class Int8Rows(nn.Module):
    """The rows of ``weight`` as FBGEMM's fused 8-bit rows.

    TorchRec's inference modules have such rows too, with scales of 16 bits in place of 32.

    Args:
        weight: float32 ``[rows, dim]``.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        import fbgemm_gpu  # noqa: F401

        # Of each row its numbers, then scale and offset, two float32.
        packed = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(weight.detach().contiguous())
        dim = weight.shape[1]
        self.register_buffer("numbers", packed[:, :dim].contiguous())
        scales = packed[:, dim:].contiguous().view(torch.float32)
        self.register_buffer("scales", scales.contiguous())

    def forward(self, ids: Tensor) -> Tensor:
        """Float32 ``[num_ids, dim]``."""
        # Not by an index in brackets, to which -1 is the last row.
        scale, offset = self.scales.index_select(0, ids).unbind(1)
        return self.numbers.index_select(0, ids).float() * scale.unsqueeze(1) + offset.unsqueeze(1)

    numbers: Tensor
    scales: Tensor
