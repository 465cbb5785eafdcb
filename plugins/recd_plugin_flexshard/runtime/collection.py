"""An EmbeddingCollection that knows which rows of its tables are to have copies when sharded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from recd_plugin_flexshard.runtime.tiers import RowTiers
from recd_plugins.api import SetupError

#: The tiers whose rows have copies.
CopyTier = Literal["hot", "flex"]
_SCALAR_BYTES = 4
# Of a copy: which row of its table it is.
_ROW_BYTES = 8
# Of a chosen row, wherever its copies are: the row, its key, its place, and at most one bucket.
_CHOSEN_BYTES = 24
# What a collection is made with beside its tables. The last ones are not in torchrec 1.6 and 1.7.
_OPTIONS = ("need_indices", "use_gather_select", "use_gather_select_per_sharding")


class TieredEmbeddingCollection(EmbeddingCollection):
    """The same tables, parameters, state dict and forward as the collection that it replaces.

    DistributedModelParallel shards it by ``TieredEmbeddingCollectionSharder``. The tables stay
    whole and in their own order; copies of the rows in ``tiers`` are laid over them.

    Args:
        collection: whose tables these are; they are shared, not copied.
        tiers: by table name; tables without an entry have no tiers.
        retier_every: choose the tiers' rows anew after that many steps, from the accesses in them.
            Without it they stay. The tiers' sizes stay in any case.
        sparse: tiers whose copies' gradients are summed over the ranks for the rows alone that some
            rank looked up; those of other tiers for all.

    Raises:
        SetupError: tiers of a table that is not there, of rows that it does not have, of one that
            shares a feature with another, or of one whose rows are not 32-bit floats.
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
        _refuse_shared_features(configs, tiers)
        by_name = {config.name: config for config in configs}
        for table, rows in tiers.items():
            if table not in by_name:
                raise SetupError(
                    f"tiers of table {table}, but the EmbeddingCollection has {', '.join(by_name)}"
                )
            if by_name[table].data_type != DataType.FP32:
                raise SetupError(
                    f"table {table} has rows of {by_name[table].data_type.value}; "
                    "tiers are for tables of 32-bit floats"
                )
            rows.check(table, by_name[table].num_embeddings)
        if retier_every is not None and retier_every < 1:
            raise SetupError(f"retier_every is {retier_every}: give a number of steps from 1")
        self.tiers: dict[str, RowTiers] = {
            # In the order of the tables, whatever the order of the mapping.
            config.name: tiers[config.name]
            for config in configs
            if config.name in tiers
        }
        self.retier_every = retier_every
        self.sparse: frozenset[CopyTier] = frozenset(sparse)

    @property
    def num_hot(self) -> int:
        """Rows of all tables that are hot."""
        return sum(len(tiers.hot) for tiers in self.tiers.values())

    @property
    def num_flex(self) -> int:
        """Rows of all tables that are flex."""
        return sum(len(tiers.flex) for tiers in self.tiers.values())

    def overlay_bytes(self, ranks_per_node: int, optimizer: str) -> int:
        """See the function of that name."""
        return overlay_bytes(
            self.num_hot, self.num_flex, self.embedding_dim(), ranks_per_node, optimizer
        )


def _refuse_shared_features(configs: Sequence[EmbeddingConfig], tiers: Collection[str]) -> None:
    looked_up: dict[str, str] = {}
    for config in configs:
        for feature in config.feature_names:
            first = looked_up.setdefault(feature, config.name)
            if first != config.name and not {first, config.name}.isdisjoint(tiers):
                raise SetupError(
                    f"feature {feature} looks up tables {first} and {config.name}, one of which "
                    "has tiers: put them into an EmbeddingCollection each"
                )


def overlay_bytes(
    num_hot: int, num_flex: int, embedding_dim: int, ranks_per_node: int, optimizer: str
) -> int:
    """Bytes that copies of rows take at most on the rank with most of them, beside the tables.

    Copies with their optimizer state, and what finds ids in them, of which 8 bytes a chosen row
    are in host memory. Buffers of a step (a gradient of the size of the copies while the
    backward pass runs) are not in it.

    Args:
        num_hot: rows that are hot, of tables of one collection.
        num_flex: rows of them that are flex.
        embedding_dim: scalars a row.
        ranks_per_node: that deal a node's flex rows out among them.
        optimizer: ``"sgd"`` or ``"rowwise_adagrad"``, which has one scalar a row.
    """
    scalars = embedding_dim + (optimizer == "rowwise_adagrad")
    held = num_hot + -(-num_flex // ranks_per_node)
    return held * (scalars * _SCALAR_BYTES + _ROW_BYTES) + (num_hot + num_flex) * _CHOSEN_BYTES
