"""An EmbeddingCollection and what pools its sequences, over unique rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.distributed.batch_form import keep_inverse_indices
from recd_plugins.distributed.stored_rows import (
    gives_stored_rows,
    set_takes_stored_rows,
    takes_stored_rows,
)
from recd_plugins.errors import ExactnessError, PluginError, SetupError
from recd_plugins.interfaces import Pooling, TargetPooling
from recd_plugins.manager import installed_class, installed_plugin
from recd_plugins.plugin_call import plugin_call
from recd_plugins.sparse.deduplicated_kjt import unique_rows
from recd_plugins.sparse.index_select import index_select, jagged_index_select
from recd_plugins.words import shortened

logger = logging.getLogger(__name__)

# Modules that look at all rows of a batch, or draw numbers for each; lazy ones are no subclasses.
_BY_ROWS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU),
)

#: A feature, or features whose rows are pooled together.
Pooled = str | tuple[str, ...]


class PooledSequences(nn.Module):
    """An EmbeddingCollection whose sequences are pooled: ``pooling(sequences(kjt)[feature])``.

    It takes a KeyedJaggedTensor, plain or as ``Wrapped.dedup`` makes it, which then deduplicates
    its features: ids are sent, looked up and pooled once for equal rows, and the vectors of all
    rows come out in their order. The table's module is ``sequences``, sharded by sharders of
    ``Wrapped.sharders``.

    Args:
        sequences: not sharded; it is to have no other users.
        poolings: for each feature, or tuple of features, what pools it: a module that is called
            with the JaggedTensor of each of its features, embeddings ``[num_values,
            embedding_dim]`` of any number of rows, and returns a tensor ``[num_rows, ...]`` whose
            rows depend on their own sequences alone; or a pooling plugin, or the name of an
            installed one, as registry files have it.

    Raises:
        SetupError: ``sequences`` is of another type, or a feature is not pooled, unknown, or looked
            up in several tables.
        PluginError: a pooling plugin fails, is not installed, or needs the item of each row.

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
                f"PooledSequences takes an EmbeddingCollection that is not sharded, not a "
                f"{type(sequences).__name__}"
            )
        _check_features(sequences, poolings)
        set_takes_stored_rows(sequences)
        self.sequences = sequences
        dims = {f: c.embedding_dim for c in sequences.embedding_configs() for f in c.feature_names}
        # A module of its own: train pipelines trace what calls the tables.
        self.pooling = _RowsPooled(
            {each: _module(each, pooling, dims) for each, pooling in poolings.items()}
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[Pooled, Tensor]:
        """What each pooling gives, for all rows.

        Raises:
            ExactnessError: ``features`` is deduplicated, and the sharder of ``sequences`` or the
                lack of inverse indices loses which row is which.
        """
        stored = takes_stored_rows(self.sequences)
        unique = gives_stored_rows(self.sequences)
        pooled: dict[Pooled, Tensor] = self.pooling(
            self.sequences(features), features, stored, unique
        )
        return pooled


class _RowsPooled(nn.Module):
    def __init__(self, poolings: Mapping[Pooled, nn.Module]) -> None:
        super().__init__()
        self.features = {each: (each,) if isinstance(each, str) else each for each in poolings}
        # By feature with a prefix: a ModuleDict takes no key like `items`, a name of its own.
        self.poolings = nn.ModuleDict({_key(each): module for each, module in poolings.items()})

    def forward(
        self,
        embeddings: dict[str, JaggedTensor],
        features: KeyedJaggedTensor,
        stored: bool,
        unique: bool,
    ) -> dict[Pooled, Tensor]:
        # Any other module has looked up all rows, which a deduplicated batch has, too.
        if unique:
            features = unique_rows(features)
        if not features.variable_stride_per_key():
            return {
                each: self._pooled(each, [embeddings[name] for name in names])
                for each, names in self.features.items()
            }
        inverse, num_stored = _inverse_of(features, stored)
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
            pooled = self._pooled(each, rows)
            found[each] = index_select(pooled, of_all)
        return found

    def _pooled(self, each: Pooled, rows: Sequence[JaggedTensor]) -> Tensor:
        pooled = self.poolings[_key(each)](*rows)
        num_rows = rows[0].lengths().numel()
        if not isinstance(pooled, Tensor) or pooled.dim() < 2 or pooled.shape[0] != num_rows:
            shape = list(getattr(pooled, "shape", ())) or type(pooled).__name__
            raise ExactnessError(
                f"the pooling of {each} gave {shape} for {num_rows} rows; expected [{num_rows}, "
                "...], one vector or more a row"
            )
        return pooled


def _inverse_of(
    features: KeyedJaggedTensor, stored: bool
) -> tuple[dict[str, Tensor], dict[str, int]]:
    indices = features.inverse_indices_or_none()
    if not stored or indices is None:
        raise ExactnessError(
            "PooledSequences got a deduplicated batch "
            + (
                "without inverse_indices, which say what its rows are"
                if stored
                else "whose EmbeddingCollection another sharder has, which gives no unique rows: "
                "shard it by ready.sharders(...)"
            )
        )
    keep_inverse_indices(features)
    return (
        dict(zip(indices[0], indices[1].unbind(), strict=True)),
        dict(zip(features.keys(), features.stride_per_key(), strict=True)),
    )


def _joined(inverse: Sequence[Tensor], num_stored: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Of rows that are equal in all features, the stored one in each; and which each row is."""
    of_all = inverse[0]
    num_rows = num_stored[0]
    for each, stored in zip(inverse[1:], num_stored[1:], strict=True):
        distinct, of_all = torch.unique(of_all * stored + each, return_inverse=True)
        num_rows = len(distinct)
    return [each.new_empty(num_rows).scatter_(0, of_all, each) for each in inverse], of_all


def _check_features(sequences: EmbeddingCollection, poolings: Mapping[Pooled, object]) -> None:
    looked_up = [name for c in sequences.embedding_configs() for name in c.feature_names]
    pooled = {name for each in poolings for name in ([each] if isinstance(each, str) else each)}
    if unknown := pooled.difference(looked_up):
        raise SetupError(
            f"PooledSequences: {shortened(sorted(unknown))} is no feature of the "
            f"EmbeddingCollection, which has {shortened(looked_up)}"
        )
    if left := sorted(set(looked_up) - pooled):
        raise SetupError(
            f"PooledSequences: nothing pools {shortened(left)}: name what does, or look it up in "
            "an EmbeddingCollection of its own"
        )
    if len(set(looked_up)) < len(looked_up):
        twice = sorted({name for name in looked_up if looked_up.count(name) > 1})
        raise SetupError(
            f"PooledSequences: {shortened(twice)} is looked up in several tables: give each an "
            "EmbeddingCollection"
        )


def _module(each: Pooled, pooling: nn.Module | Pooling | str, dims: Mapping[str, int]) -> nn.Module:
    if isinstance(pooling, nn.Module):
        for name, module in pooling.named_modules():
            if what := _by_rows(module):
                logger.warning(
                    "the pooling of %s has %s, a %s: of a deduplicated batch it sees equal rows "
                    "once, which is another training; put it behind PooledSequences, or drop it",
                    each,
                    name or "itself",
                    what,
                )
        return pooling
    if not isinstance(pooling, (Pooling, str)):
        instance = f"; did you mean {pooling.__name__}()?" if isinstance(pooling, type) else ""
        raise SetupError(
            f"PooledSequences: {each} is pooled by {pooling!r}; expected an nn.Module, a pooling "
            f"plugin or the name of one{instance}"
        )
    found = installed_class("pooling", pooling) if isinstance(pooling, str) else type(pooling)
    if issubclass(found, TargetPooling) or not isinstance(each, str):
        needs = "needs the item of each row" if isinstance(each, str) else "pools one feature"
        raise PluginError(
            f"{found.name} {needs}, and cannot pool {each} here: use SequencePooling, or a module "
            "of your own"
        )
    plugin = installed_plugin("pooling", pooling) if isinstance(pooling, str) else pooling
    assert isinstance(plugin, Pooling)
    with plugin_call(plugin, f"build for feature {each}"):
        return plugin.build(dims[each])


def _by_rows(module: nn.Module) -> str:
    """What looks at all rows of a batch, or draws numbers for each; empty of any other module."""
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout:
        return f"{kind} with dropout"
    return kind if isinstance(module, _BY_ROWS) else ""


def _key(each: Pooled) -> str:
    return f"of_{each}" if isinstance(each, str) else f"of_{'+'.join(each)}"
