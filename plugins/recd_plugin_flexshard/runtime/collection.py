"""EmbeddingCollections that list the rows to copy to other ranks when sharded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from recd_plugins.api import SetupError

#: The tiers whose rows have copies.
CopyTier = Literal["hot", "flex"]
_SCALAR_BYTES = 4
# Bytes to store the row number of a copy.
_ROW_BYTES = 8
# Bytes in the index for a hot or flex row: its number, its key, its position, at most one bucket.
_CHOSEN_BYTES = 24
# Arguments of an EmbeddingCollection besides its tables. Older versions of TorchRec lack some.
_OPTIONS = ("need_indices", "use_gather_select", "use_gather_select_per_sharding")


@dataclass(frozen=True, eq=False)
class RowTiers:
    """The rows of one table to copy (FlexShard, arXiv 2301.02959, section 3).

    Attributes:
        hot: rows to copy to every rank, int64 ``[num_hot]``, most frequently read first.
        flex: rows to copy to every node, int64 ``[num_flex]``, most frequently read first. Each
            rank of a node has a part of the node's copies. All other rows are cold (not copied).

    Raises:
        SetupError: a row number is negative or appears twice.
    """

    hot: NDArray[np.int64]
    flex: NDArray[np.int64]

    def __init__(self, hot: ArrayLike = (), flex: ArrayLike = ()) -> None:
        for name, rows in (("hot", hot), ("flex", flex)):
            array = np.array(rows, dtype=np.int64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        chosen = np.concatenate([self.hot, self.flex])
        if len(np.unique(chosen)) < len(chosen) or (chosen < 0).any():
            raise SetupError(
                "RowTiers: a row number in 'hot' or 'flex' is negative or appears twice. Use each "
                "row number once."
            )


class TieredEmbeddingCollection(EmbeddingCollection):
    """An EmbeddingCollection whose frequently read rows are copied to more ranks when sharded.

    Replaces ``collection`` in a model. ``TieredEmbeddingCollectionSharder`` shards the tables
    row-wise and adds copies of the rows in ``tiers``.

    Args:
        collection: collection to replace. Its tables are shared, not copied.
        tiers: rows to copy, keyed by table name. Tables without an entry have no row copies.
        retier_every: number of steps after which the most frequent rows of recent lookups become
            the rows to copy. The number of rows stays the same. None keeps the rows.
        sparse: ``hot``, ``flex`` or both, whose copies exchange only gradients of looked-up rows.

    Raises:
        SetupError: a row number is too large, a table with copies shares a feature with another
            table, or a table with copies is not float32.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        tiers: Mapping[str, RowTiers],
        retier_every: int | None = None,
        sparse: Collection[CopyTier] = (),
    ) -> None:
        configs = collection.embedding_configs()
        super().__init__(
            tables=configs,
            device=torch.device("meta"),  # the tables below are the collection's
            **{name: getattr(collection, name)() for name in _OPTIONS if hasattr(collection, name)},
        )
        self.embeddings = collection.embeddings
        self._device = collection.device
        _check(configs, tiers)
        # In the order of the tables.
        self.tiers = {config.name: tiers[config.name] for config in configs if config.name in tiers}
        self.retier_every = retier_every
        self.sparse: frozenset[CopyTier] = frozenset(sparse)

    def overlay_bytes(self, ranks_per_node: int, optimizer: str) -> int:
        """Return the maximum bytes of the row copies on one rank.

        Args:
            ranks_per_node: number of ranks of a node.
            optimizer: ``sgd`` or ``rowwise_adagrad``.
        """
        num_hot = sum(len(tiers.hot) for tiers in self.tiers.values())
        num_flex = sum(len(tiers.flex) for tiers in self.tiers.values())
        return overlay_bytes(num_hot, num_flex, self.embedding_dim(), ranks_per_node, optimizer)


def _check(configs: Sequence[EmbeddingConfig], tiers: Mapping[str, RowTiers]) -> None:
    looked_up: dict[str, str] = {}
    for config in configs:
        name = config.name
        for feature in config.feature_names:
            first = looked_up.setdefault(feature, name)
            if first != name and not {first, name}.isdisjoint(tiers):
                raise SetupError(
                    f"feature {feature!r}: tables {first!r} and {name!r} of one "
                    "EmbeddingCollection share this feature, which flexshard does not support. "
                    "Put each table into its own EmbeddingCollection."
                )
        if name not in tiers:
            continue
        if config.data_type != DataType.FP32:
            raise SetupError(
                f"table {name!r}: flexshard supports only FP32 tables, but the data type is "
                f"{config.data_type.value}. Use DataType.FP32, or remove the table from the "
                "argument 'tiers'."
            )
        last = np.concatenate([tiers[name].hot, tiers[name].flex]).max(initial=0)
        if last >= config.num_embeddings:
            raise SetupError(
                f"table {name!r}: row {last} has to be copied, but the table has only "
                f"{config.num_embeddings} rows. Use an access profile of the current table."
            )


def overlay_bytes(
    num_hot: int, num_flex: int, embedding_dim: int, ranks_per_node: int, optimizer: str
) -> int:
    """Return the maximum bytes of the row copies on one rank.

    Includes the copies, their optimizer state and an index from id to copy. Excludes gradients,
    which are as large as the copies.
    """
    scalars = embedding_dim + (optimizer == "rowwise_adagrad")
    held = num_hot + -(-num_flex // ranks_per_node)
    return held * (scalars * _SCALAR_BYTES + _ROW_BYTES) + (num_hot + num_flex) * _CHOSEN_BYTES


def with_tiers(
    model: nn.Module,
    tiers: Mapping[str, RowTiers],
    retier_every: int | None,
    sparse: Collection[CopyTier] = (),
) -> nn.Module:
    """Replace EmbeddingCollections in ``model`` by TieredEmbeddingCollections. Return the model.

    Replaces collections that have a table in ``tiers``. Tiers from an earlier call stay for tables
    that are not in ``tiers``. ``retier_every`` and ``sparse`` apply to all replaced collections.

    Raises:
        SetupError: an earlier call set another ``retier_every`` for the same collection.
    """
    tiered = {
        module: _tiered(path, module, tiers, retier_every, sparse)
        for path, module in model.named_modules()
        if isinstance(module, EmbeddingCollection)
        and any(config.name in tiers for config in module.embedding_configs())
    }
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, EmbeddingCollection) and child in tiered:
                setattr(parent, name, tiered[child])
    return tiered.get(model, model) if isinstance(model, EmbeddingCollection) else model


def _tiered(
    path: str,
    collection: EmbeddingCollection,
    tiers: Mapping[str, RowTiers],
    every: int | None,
    sparse: Collection[CopyTier],
) -> TieredEmbeddingCollection:
    names = [config.name for config in collection.embedding_configs()]
    chosen = {name: tiers[name] for name in names if name in tiers}
    if isinstance(collection, TieredEmbeddingCollection):
        if collection.retier_every != every:
            given = " and ".join(
                f"retier_every: {n or 'null'}" for n in (collection.retier_every, every)
            )
            raise SetupError(
                f"tables {', '.join(map(repr, [*collection.tiers, *chosen]))} are in one "
                f"EmbeddingCollection ({path!r}), but their sharding: entries have different "
                f"values: {given}. Set retier_every to the same value in these entries."
            )
        chosen = {**collection.tiers, **chosen}
        # A sum of touched rows sends at most one bit per row and rank more than a sum of all rows.
        sparse = collection.sparse.union(sparse)
    return TieredEmbeddingCollection(collection, chosen, every, sparse)
