"""The model and the data of the DLRM paper's section 5.2 (arXiv 1906.00091), at any size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recd_plugins.api.registry import ModelSpec, TrainingSpec

Architecture = Literal["dlrm", "dcn"]

FEATURES = tuple(f"cat_{number}" for number in range(8))
NUM_DENSE = 512
#: Rates at which nothing amplifies rounding: losses are compared.
TRAINING = TrainingSpec(optimizer="sgd", learning_rate=0.1)


@dataclass(frozen=True)
class Configuration:
    """Sizes; but for rows and batch those of the paper.

    Attributes:
        rows: of each table.
        batch_size: rows of a batch.
        max_lookups: a lookup has 1 to so many ids, all numbers equally likely.
    """

    rows: int = 1_000_000
    batch_size: int = 2048
    max_lookups: int = 100

    def spec(self, architecture: Architecture) -> ModelSpec:
        """The demo model of this configuration."""
        return ModelSpec(
            architecture=architecture,
            embedding_dim=64,
            num_embeddings=self.rows,
            bottom_mlp=[512],
            top_mlp=[1024, 1024, 1024],
        )


@dataclass(frozen=True)
class RandomBatch:
    """Uniform ids and dense features, and labels of a coin.

    Attributes:
        dense: float32 ``[B, NUM_DENSE]``.
        labels: float32 ``[B]``.
        ids: int64, feature by feature.
        lengths: int64 ``[F * B]``, feature by feature.
    """

    dense: Tensor
    labels: Tensor
    ids: Tensor
    lengths: Tensor


def random_batches(configuration: Configuration, count: int) -> Iterator[RandomBatch]:
    """The same ones every time."""
    batch_size = configuration.batch_size
    draw = torch.Generator().manual_seed(0)
    for _ in range(count):
        lengths = torch.randint(
            1, configuration.max_lookups + 1, (len(FEATURES) * batch_size,), generator=draw
        )
        yield RandomBatch(
            dense=torch.rand(batch_size, NUM_DENSE, generator=draw),
            labels=torch.randint(0, 2, (batch_size,), generator=draw).float(),
            ids=torch.randint(0, configuration.rows, (int(lengths.sum()),), generator=draw),
            lengths=lengths,
        )
