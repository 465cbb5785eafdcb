"""Random rows of sessions: rows next to each other repeat what is known of a user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class Size:
    """How large a trainer is.

    Attributes:
        batch_size: rows of a step of one rank.
        num_batches: that go round.
        num_embeddings: rows of a table.
        embedding_dim: of all tables.
        max_length: the most ids of a list, where a trainer has lists of any length.
    """

    batch_size: int
    num_batches: int
    num_embeddings: int
    embedding_dim: int
    max_length: int


@dataclass
class Trainer:
    """What makes steps of one rank.

    Attributes:
        dmp: the sharded model.
        pipeline: trains it, with its optimizers.
        batches: what the pipeline is fed from.
        schedule: of the learning rate, or None.
    """

    dmp: nn.Module
    pipeline: Any
    batches: Any
    schedule: Any = None

    def step(self) -> Tensor:
        """One step; its loss."""
        loss, *_ = self.pipeline.progress(self.batches)
        if self.schedule is not None:
            self.schedule.step()
        return loss


@dataclass(frozen=True)
class Feature:
    """A feature of random ids.

    Attributes:
        lengths: the least and the most ids of a row.
        changes: share of the rows of a session whose ids are others than those of the row before.
    """

    name: str
    lengths: tuple[int, int] = (1, 1)
    changes: float = 1.0


def draw(
    features: Sequence[Feature],
    num_rows: int,
    rows_per_session: int,
    num_embeddings: int,
    generator: torch.Generator,
) -> KeyedJaggedTensor:
    """Rows session by session."""
    starts = torch.rand(num_rows, generator=generator) < 1 / rows_per_session
    values, lengths = [], []
    for feature in features:
        changed = starts | (torch.rand(num_rows, generator=generator) < feature.changes)
        changed[0] = True
        low, high = feature.lengths
        distinct = torch.randint(low, high + 1, (int(changed.sum()),), generator=generator)
        ids = torch.randint(num_embeddings, (int(distinct.sum()),), generator=generator)
        taken = changed.cumsum(0) - 1
        of_rows = distinct[taken]
        first = (distinct.cumsum(0) - distinct)[taken] - (of_rows.cumsum(0) - of_rows)
        values.append(ids[torch.arange(int(of_rows.sum())) + first.repeat_interleave(of_rows)])
        lengths.append(of_rows.int())
    return KeyedJaggedTensor(
        keys=[feature.name for feature in features],
        values=torch.cat(values),
        lengths=torch.cat(lengths),
    )
