"""An EmbeddingCollection with sequence pooling that runs on unique rows only."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.config.manager import installed_class, installed_plugin
from recd_plugins.interfaces import Pooling, TargetPooling
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.errors import ExactnessError, PluginError, SetupError
from recd_plugins.runtime.text import shortened
from recd_plugins.sharding.batch_form import (
    accepts_deduplicated,
    keep_inverse_indices,
    returns_unique_rows,
    set_accepts_deduplicated,
)
from recd_plugins.sparse.deduplicated_kjt import unique_rows
from recd_plugins.sparse.index_select import index_select, jagged_index_select

logger = logging.getLogger(__name__)

# Modules whose output for a row depends on other rows or on random numbers.
_BY_ROWS = (
    *(nn.BatchNorm1d, nn.LazyBatchNorm1d, nn.SyncBatchNorm),
    *(nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU),
)

#: A feature, or features whose rows are pooled together.
Pooled = str | tuple[str, ...]


class PooledSequences(nn.Module):
    """An EmbeddingCollection whose sequences are pooled: ``pooling(sequences(kjt)[feature])``.

    The input is a KeyedJaggedTensor, plain or deduplicated by ``Wrapped.dedup``. If it is
    deduplicated, equal rows are sent, looked up and pooled only once. The output always has the
    vectors of all rows in their order. The attribute ``sequences`` is the EmbeddingCollection,
    which the sharders of ``Wrapped.sharders`` shard.

    Args:
        sequences: an unsharded EmbeddingCollection that no other module uses.
        poolings: dict from each feature, or tuple of features, to its pooling: a module, a pooling
            plugin, or the name of an installed plugin. A module is called with one JaggedTensor per
            feature, with float embeddings ``[num_values, embedding_dim]``. It returns ``[num_rows,
            ...]``. Each output row must depend only on its own sequence.

    Raises:
        SetupError: ``sequences`` is of another type, or a feature is not pooled, unknown, or looked
            up in several tables.
        PluginError: a pooling plugin fails, is not installed, or needs a target item per row.

    Example::

        self.histories = recd_plugins.PooledSequences(self.sequences, {"clicks": self.attention})
        ...
        clicks = self.histories(batch.sparse_features)["clicks"]
    """

    def __init__(
        self,
        sequences: EmbeddingCollection,
        poolings: Mapping[Pooled, nn.Module | Pooling | str],
    ) -> None:
        super().__init__()
        if type(sequences) is not EmbeddingCollection:
            raise SetupError(
                f"PooledSequences got a {type(sequences).__name__!r}. Pass an unsharded "
                "EmbeddingCollection, not a subclass."
            )
        looked_up = [name for c in sequences.embedding_configs() for name in c.feature_names]
        pooled = {name for each in poolings for name in ([each] if isinstance(each, str) else each)}
        if {*looked_up} != pooled or len({*looked_up}) < len(looked_up):
            raise SetupError(
                f"PooledSequences pools the features {shortened(sorted(pooled))}, but its "
                f"EmbeddingCollection looks up {shortened(looked_up)}. Pool each feature of this "
                "EmbeddingCollection, and look up each feature in only one table."
            )
        set_accepts_deduplicated(sequences)
        self.sequences = sequences
        dims = {f: c.embedding_dim for c in sequences.embedding_configs() for f in c.feature_names}
        # A separate module, because train pipelines trace the module that calls the tables.
        self.pooling = _RowsPooled(
            {each: _module(each, pooling, dims) for each, pooling in poolings.items()}
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[Pooled, Tensor]:
        """Return a dict from each feature, or tuple of features, to vectors of all rows.

        Raises:
            ExactnessError: a pooling returned a wrong shape, or not all rows of deduplicated
                ``features`` can be restored: inverse indices are missing, or ``sequences`` was
                sharded by another sharder.
        """
        stored = accepts_deduplicated(self.sequences)
        unique = returns_unique_rows(self.sequences)
        pooled: dict[Pooled, Tensor] = self.pooling(
            self.sequences(features), features, stored, unique
        )
        return pooled


class _RowsPooled(nn.Module):
    def __init__(self, poolings: Mapping[Pooled, nn.Module]) -> None:
        super().__init__()
        self.features = {each: (each,) if isinstance(each, str) else each for each in poolings}
        # Keys have a prefix: a ModuleDict rejects keys such as `items` that are its own attributes.
        self.poolings = nn.ModuleDict({_key(each): module for each, module in poolings.items()})

    def forward(
        self,
        embeddings: dict[str, JaggedTensor],
        features: KeyedJaggedTensor,
        stored: bool,
        unique: bool,
    ) -> dict[Pooled, Tensor]:
        # Any other module has looked up all rows; a deduplicated batch contains them too.
        if unique:
            features = unique_rows(features)
        if not features.variable_stride_per_key():
            return {
                each: self._pooled(each, [embeddings[name] for name in names])
                for each, names in self.features.items()
            }
        indices = features.inverse_indices_or_none()
        if not stored or indices is None:
            raise ExactnessError(
                "PooledSequences got a deduplicated batch, but the batch has no inverse_indices, "
                "or another sharder has sharded the EmbeddingCollection. "
                "Use the sharders of ready.sharders(...)."
            )
        keep_inverse_indices(features)
        inverse = dict(zip(indices[0], indices[1].unbind(), strict=True))
        num_stored = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        found: dict[Pooled, Tensor] = {}
        for each, names in self.features.items():
            rows = [
                JaggedTensor(
                    values=embeddings[n].values(),
                    weights=embeddings[n].weights_or_none(),
                    lengths=embeddings[n].lengths()[: num_stored[n]],
                )
                for n in names
            ]
            of_all = inverse[names[0]]
            if len(names) > 1:
                together, of_all = _joined(
                    [inverse[name] for name in names], [num_stored[name] for name in names]
                )
                rows = [
                    jagged_index_select(of_name, unique)
                    for of_name, unique in zip(rows, together, strict=True)
                ]
            found[each] = index_select(self._pooled(each, rows), of_all)
        return found

    def _pooled(self, each: Pooled, rows: Sequence[JaggedTensor]) -> Tensor:
        pooled: Tensor = self.poolings[_key(each)](*rows)
        num_rows = rows[0].lengths().numel()
        if pooled.dim() < 2 or pooled.shape[0] != num_rows:
            raise ExactnessError(
                f"the pooling of {each!r} returned the shape {list(pooled.shape)} for {num_rows} "
                f"rows. Return a tensor [{num_rows}, ...], with one vector or more per row."
            )
        return pooled


def _joined(inverse: Sequence[Tensor], num_stored: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Deduplicate rows over all features; return stored rows by feature, and inverse indices."""
    of_all = inverse[0]
    num_rows = num_stored[0]
    for each, stored in zip(inverse[1:], num_stored[1:], strict=True):
        distinct, of_all = torch.unique(of_all * stored + each, return_inverse=True)
        num_rows = len(distinct)
    return [each.new_empty(num_rows).scatter_(0, of_all, each) for each in inverse], of_all


def _module(each: Pooled, pooling: nn.Module | Pooling | str, dims: Mapping[str, int]) -> nn.Module:
    if isinstance(pooling, nn.Module):
        for name, module in pooling.named_modules():
            drops = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout
            if isinstance(module, _BY_ROWS) or drops:
                logger.warning(
                    "the pooling of %r contains a %s (%s), which changes training, because it sees "
                    "equal rows only once. Apply it to the output of PooledSequences instead.",
                    *(each, type(module).__name__, name or "the pooling itself"),
                )
        return pooling
    found = installed_class("pooling", pooling) if isinstance(pooling, str) else type(pooling)
    if issubclass(found, TargetPooling) or not isinstance(each, str):
        why = "it pools only one feature. List the features one by one"
        if issubclass(found, TargetPooling):
            why = "it needs a target vector per row. Use SequencePooling"
        raise PluginError(
            f"{found.name!r} cannot pool {each!r} in PooledSequences, because {why}, or pass a "
            "module of your own."
        )
    plugin = installed_plugin("pooling", pooling) if isinstance(pooling, str) else pooling
    assert isinstance(plugin, Pooling)
    with plugin_call(plugin, f"build for feature {each!r}"):
        return plugin.build(dims[each])


def _key(each: Pooled) -> str:
    return f"of_{each}" if isinstance(each, str) else f"of_{'+'.join(each)}"
