"""How much faster a step can become where work shrinks by its dedupe factor and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recd_plugins.api.planning import Stage, StageTimes


@dataclass(frozen=True)
class DedupeFactors:
    """Work of the stock path over work of the deduplicated one, counted and not timed.

    Attributes:
        ids: looked up.
        bytes: sent by all-to-alls.
        pooling: ids of sequence features, which poolings go through.
    """

    ids: float
    bytes: float
    pooling: float


def speedup_bound(
    baseline: StageTimes, pooling: Mapping[Stage, float], factors: DedupeFactors
) -> float:
    """The stock step's time over that of a step in which each stage shrinks by its factor.

    Lookups shrink with ids, the all-to-all with its bytes, and what sequence pooling has of matrix
    products and of other work with the ids of sequences. Nothing else does: MLPs and interaction,
    their gradients' all-reduce, optimizer, and what runs once a step or once a feature.

    Args:
        baseline: seconds of a stock step.
        pooling: shares of sequence pooling in ``gemm`` and in ``other``.
        factors: of the batches that were timed.
    """
    least = (
        baseline.lookup / factors.ids
        + baseline.all_to_all / factors.bytes
        + baseline.gemm * _left(pooling["gemm"], factors.pooling)
        + baseline.all_reduce
        + baseline.other * _left(pooling["other"], factors.pooling)
    )
    return baseline.total / least


def _left(share: float, factor: float) -> float:
    """What is left of a stage of which ``share`` shrinks by ``factor``."""
    return share / factor + 1 - share
