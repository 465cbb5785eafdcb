"""EmbeddingCollections that look up the stored rows of a deduplicated batch, and return those."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.data.lower import plain_kjt
from recd_plugins.distributed.batch_form import BatchForm

# An attribute, which a copy of the module has too.
_MARK = "recd_takes_stored_rows"


def set_takes_stored_rows(module: nn.Module) -> None:
    """Mark an EmbeddingCollection, whose users all want stored rows."""
    setattr(module, _MARK, True)


def takes_stored_rows(module: Any) -> bool:
    """Whether a module is marked so, or was before it was sharded."""
    return getattr(module, _MARK, False) or gives_stored_rows(module)


def gives_stored_rows(module: Any) -> bool:
    """Whether a module is sharded so that it returns the unique rows of a deduplicated batch."""
    return isinstance(getattr(module, "form", None), StoredRows)


class StoredRows(BatchForm):
    """The form of batches whose module gets the unique rows as a plain batch."""

    @property
    def takes_unique_rows(self) -> bool:
        """Always: they are looked up as plain rows."""
        return True

    def fit(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Rows of the module's features; those that store fewer get empty ones at their end."""
        keys = features.keys()
        chosen = [key for key in keys if key in self._features]
        if features.variable_stride_per_key():
            return _plain(features, chosen)
        # The same features as of deduplicated batches, as TorchRec keeps to their places.
        if len(chosen) == len(keys):
            return features
        return features.permute([keys.index(key) for key in chosen])


def _plain(features: KeyedJaggedTensor, chosen: list[str]) -> KeyedJaggedTensor:
    keys = features.keys()
    strides, num_values = features.stride_per_key(), features.length_per_key()
    weights = features.weights_or_none()
    rows = {
        key: JaggedTensor(values, of_values, lengths)
        for key, values, lengths, of_values in zip(
            keys,
            features.values().split(num_values),
            features.lengths().split(strides),
            [None] * len(keys) if weights is None else weights.split(num_values),
            strict=True,
        )
    }
    most = max(stride for key, stride in zip(keys, strides, strict=True) if key in chosen)
    plain = plain_kjt(chosen, [rows[key] for key in chosen], most)
    assert plain is not None, "it has features"
    return plain
