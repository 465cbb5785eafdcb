"""The model and the data of the parity tests of tiered tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import torch
from tests.distributed.parity_model import DIM, _Attention, _Head
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime import RowTiers, TieredEmbeddingCollection
from recd_plugin_flexshard.runtime.collection import CopyTier
from recd_plugins.data.lower import lower
from recd_plugins.interfaces.batch import Batch, ModelInput, Placement
from recd_plugins.sparse import InverseKeyedJaggedTensor

NUM_STEPS = 6
Form = Literal["kjt", "ikjt"]
Tiers = Literal["two", "three", "flex", "all", "few", "empty"]

# b and c look up one table; that of e never has tiers.
FEATURES = {"t0": ("a",), "t1": ("b", "c"), "t2": ("d",), "t3": ("e",)}
ROWS = {"t0": 23, "t1": 12, "t2": 31, "t3": 9}
_MAX_LENGTH = 3
_PLACEMENT = Placement(sequence=tuple(name for names in FEATURES.values() for name in names))
_GROUPS = [["a", "b"], ["c", "e"]]  # d is never deduplicated

# Most read first, which is no order of rows.
TIERS: Mapping[Tiers, Mapping[str, RowTiers]] = {
    "two": {"t0": RowTiers([7, 0, 22]), "t1": RowTiers([3, 11, 1, 4]), "t2": RowTiers()},
    "three": {
        "t0": RowTiers([7, 0], [5, 22, 1, 2, 9]),
        "t1": RowTiers([], [11, 3, 0, 6]),
        "t2": RowTiers([30, 4, 8, 12]),
    },
    "flex": {"t0": RowTiers([], [5, 22, 1]), "t2": RowTiers([], list(range(20)))},
    "all": {"t0": RowTiers(range(23)), "t1": RowTiers([], range(12)), "t2": RowTiers([1], [2])},
    "few": {"t1": RowTiers([], [4])},  # not for every rank of a node
    "empty": {"t0": RowTiers(), "t2": RowTiers()},
}


class TierModel(nn.Module):
    """One EmbeddingCollection, its features pooled and a head."""

    def __init__(
        self, tiers: Mapping[str, RowTiers] | None, sparse: Collection[CopyTier] = ()
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequences: nn.Module = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=table,
                    embedding_dim=DIM,
                    num_embeddings=ROWS[table],
                    feature_names=list(features),
                )
                for table, features in FEATURES.items()
            ]
        )
        if tiers is not None:
            self.sequences = TieredEmbeddingCollection(self.sequences, tiers, sparse=sparse)
        self.attention = _Attention(_PLACEMENT.sequence)
        self.head = _Head(len(_PLACEMENT.sequence))

    def forward(self, batch: ModelInput) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        sequences = self.sequences(batch.sequence_features)
        output = self.head(batch.dense_features, self.attention(sequences, batch))
        loss = ((output - batch.labels) ** 2).mean()
        return loss, (loss.detach(), output.detach())


def model_input(rank: int, step: int, form: Form) -> ModelInput:
    """Rows of one rank, the same in both forms.

    Batches differ in size from rank to rank and have empty lists. In the second step rank 0 has no
    id, in the third it has cold ones only, in the fourth tiered ones only, and in the fifth nobody
    has one of d.
    """
    random = torch.Generator().manual_seed(1000 * step + rank)
    size = 5 + rank % 3
    source = torch.randint(0, 3, (size,), generator=random)
    values, lengths = [], []
    for table, features in FEATURES.items():
        tiered = [
            int(row)
            for tiers in ("two", "three")
            if (rows := TIERS[tiers].get(table)) is not None
            for row in (*rows.hot, *rows.flex)
        ]
        for feature in features:
            silent = (step == 1 and rank == 0) or (step == 4 and feature == "d")
            sizes = torch.randint(0, 1 if silent else _MAX_LENGTH + 1, (3,), generator=random)
            pool = list(range(ROWS[table]))
            if rank == 0 and step == 2:
                pool = sorted(set(pool).difference(tiered))
            elif rank == 0 and step == 3:
                pool = tiered or pool
            lists = [
                torch.tensor(pool)[torch.randint(0, len(pool), (int(n),), generator=random)]
                for n in sizes
            ]
            values += [lists[int(row)] for row in source]
            lengths.append(sizes[source])
    kjt = KeyedJaggedTensor(
        keys=list(_PLACEMENT.sequence), values=torch.cat(values), lengths=torch.cat(lengths)
    )
    dense = torch.randn(size, 2, generator=random)
    labels = torch.randn(size, generator=random)
    if form == "kjt":
        return lower(Batch(dense, labels, kjt), _PLACEMENT)
    d = kjt["d"]
    rest = KeyedJaggedTensor(keys=["d"], values=d.values(), lengths=d.lengths())
    ikjts = InverseKeyedJaggedTensor.from_kjt(kjt, _GROUPS)
    return lower(Batch(dense, labels, rest, ikjts), _PLACEMENT)
