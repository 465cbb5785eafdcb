"""EmbeddingCollections that specify which rows of their tables get copies when sharded."""

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
# Bytes of a copy's row number in its table.
_ROW_BYTES = 8
# Of a chosen row, wherever its copies are: the row, its key, its place, and at most one bucket.
_CHOSEN_BYTES = 24
# Arguments of a collection beside its tables. The last ones are not in torchrec 1.6 and 1.7.
_OPTIONS = ("need_indices", "use_gather_select", "use_gather_select_per_sharding")


@dataclass(frozen=True, eq=False)
class RowTiers:
    """The rows of one table that have copies (FlexShard, arXiv 2301.02959, section 3).

    Attributes:
        hot: rows with a copy on every rank, ``[num_hot]`` int64, most read first.
        flex: rows with a copy in every node, dealt to its ranks round-robin, ``[num_flex]`` int64,
            most read first. All other rows are cold.
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
            raise SetupError("rows of tiers are negative, or in the tiers twice")


class TieredEmbeddingCollection(EmbeddingCollection):
    """An EmbeddingCollection with row tiers, otherwise equal to the collection that it replaces.

    DistributedModelParallel shards it by ``TieredEmbeddingCollectionSharder``. The tables stay
    whole and in their own order; copies of the rows in ``tiers`` are added.

    Args:
        collection: its tables are shared, not copied.
        tiers: by table name; tables without an entry have no tiers.
        retier_every: number of steps after which the tiers' rows are chosen again from recent
            accesses; None keeps the rows. The sizes of the tiers never change.
        sparse: tiers that sum gradients over the ranks only for touched rows.

    Raises:
        SetupError: a row is beyond its table, a tiered table shares a feature with another table,
            or its rows are not float32.
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
        """Return the bytes of all copies on a rank; see the module's ``overlay_bytes``."""
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
                    f"feature {feature} looks up tables {first} and {name}, one of which has "
                    "tiers: put them into an EmbeddingCollection each"
                )
        if name not in tiers:
            continue
        if config.data_type != DataType.FP32:
            raise SetupError(
                f"table {name} has rows of {config.data_type.value}; tiers are for 32-bit floats"
            )
        last = np.concatenate([tiers[name].hot, tiers[name].flex]).max(initial=0)
        if last >= config.num_embeddings:
            raise SetupError(
                f"the tiers of table {name} have row {last}, and the table has "
                f"{config.num_embeddings} rows: its access profile is of another table size"
            )


def overlay_bytes(
    num_hot: int, num_flex: int, embedding_dim: int, ranks_per_node: int, optimizer: str
) -> int:
    """Return the maximum bytes that copies of rows take on a rank, in addition to the tables.

    Counts copies with their optimizer state, and the index of ids (8 bytes a chosen row are in
    host memory), but not the gradient of a step, which is as large as the copies.
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
    """Return the model with tiers for the tables in ``tiers``; paths and parameters stay.

    Tiers from other sharding entries stay in the collection.

    Raises:
        SetupError: tables of one collection have different ``retier_every``.
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
            given = " and ".join(str(n or "null") for n in (collection.retier_every, every))
            raise SetupError(
                f"tables {', '.join([*collection.tiers, *chosen])} are in one EmbeddingCollection "
                f"({path}), and their entries say retier_every {given}; give them one"
            )
        chosen = {**collection.tiers, **chosen}
        # A sum of touched rows sends at most one bit per row and rank more than a sum of all rows.
        sparse = collection.sparse.union(sparse)
    return TieredEmbeddingCollection(collection, chosen, every, sparse)
