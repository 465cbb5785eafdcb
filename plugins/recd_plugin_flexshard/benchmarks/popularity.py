"""Batches of ids whose popularity is known: what a plan predicts can be held against them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.planning import TableDemand
from recd_plugins.api.batches import ModelInput

FEATURE = "history"
NUM_DENSE = 4


@dataclass(frozen=True)
class Popularity:
    """How often a sample reads each row of one table.

    Attributes:
        probabilities: float64 ``[E]``, expected reads a sample, most read first; may exceed 1.
        rows: int64 ``[E]``, which row of the table each of them is of.
    """

    probabilities: NDArray[np.float64]
    rows: NDArray[np.int64]

    @classmethod
    def shuffled(cls, probabilities: NDArray[np.float64], seed: int) -> Popularity:
        """Rows in an order that says nothing of how often they are read."""
        return cls(probabilities, np.random.default_rng(seed).permutation(len(probabilities)))

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return len(self.rows)

    @property
    def length(self) -> float:
        """Expected ids of a sample."""
        return float(self.probabilities.sum())

    def swapped(self, share: float, seed: int) -> Popularity:
        """Another popularity: a random ``share`` of the rows change places among each other."""
        rng = np.random.default_rng(seed)
        moving = np.flatnonzero(rng.random(self.num_embeddings) < share)
        rows = self.rows.copy()
        rows[moving] = rows[rng.permutation(moving)]
        return Popularity(self.probabilities, rows)

    def draw(self, rng: np.random.Generator, samples: int) -> NDArray[np.int64]:
        """The ids of ``samples`` samples, all in one: each read is by itself, int64 ``[ids]``."""
        num_ids = rng.poisson(samples * self.length)
        return self.rows[np.searchsorted(self._cumulative, rng.random(num_ids), side="right")]

    def batch(self, rng: np.random.Generator, samples: int) -> ModelInput:
        """A batch with one sequence feature, and labels that follow its ids."""
        ids = self.draw(rng, samples)
        lengths = np.bincount(rng.integers(0, samples, len(ids)), minlength=samples)
        effects = np.add.reduceat(np.append(_effects(ids), 0), np.cumsum(lengths) - lengths)
        noise = rng.normal(size=samples)
        labels = np.where(lengths > 0, effects, 0) / np.sqrt(np.maximum(lengths, 1)) + noise > 0
        return ModelInput(
            dense_features=torch.from_numpy(rng.random((samples, NUM_DENSE), np.float32)),
            sparse_features=None,
            labels=torch.from_numpy(labels.astype(np.float32)),
            sequence_features=KeyedJaggedTensor(
                keys=[FEATURE],
                values=torch.from_numpy(ids),
                lengths=torch.from_numpy(lengths.astype(np.int32)),
            ),
            num_unique={FEATURE: samples},
        )

    @cached_property
    def _cumulative(self) -> NDArray[np.float64]:
        cumulative = np.cumsum(self.probabilities)
        return cumulative[:-1] / cumulative[-1]


def scaled(demand: TableDemand, scale: int) -> NDArray[np.float64]:
    """The popularity of a table with one row for every ``scale`` rows of a larger one.

    With batches that are smaller by ``scale`` too and samples of the same length, the reads of a
    row in a batch, the shares of tiers and the ratio of any two bytes of a plan are the same.

    Args:
        demand: of the larger table.
        scale: a divisor of its rows.

    Returns:
        float64 ``[num_embeddings / scale]``, each the sum of ``scale`` neighbours.
    """
    repeats = np.ones(len(demand.probabilities)) if demand.repeats is None else demand.repeats
    rows = np.append(0, np.cumsum(repeats))
    reads = np.append(0, np.cumsum(repeats * demand.probabilities))
    ends = np.arange(0, demand.num_embeddings + 1, scale)
    # Sorted, as neighbours of equal probability differ by rounding.
    return np.sort(np.diff(np.interp(ends, rows, reads)))[::-1]


def _effects(ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """A hidden effect of each id, between -1 and 1."""
    hashed = (ids.astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
    return (hashed >> np.uint64(40)).astype(np.float64) / (1 << 23) - 1
