"""A trained model with its preprocessing as one module, from raw ids to probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recd_plugin_scoring.plain_tables import StoredRows
from recd_plugins.api import FeatureSchema, Preprocessing
from recd_plugins.api.batches import ModelInput


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
