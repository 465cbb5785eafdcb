"""Access profiles computed from distributions, in accesses per sample."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recd_plugins.interfaces.access import TableAccess


def zipf(
    table: str,
    num_embeddings: int,
    length: float,
    exponent: float,
    *,
    shift: float = 0.0,
    seed: int | None = None,
    features: tuple[str, ...] = (),
) -> TableAccess:
    """Return Zipf's law: the k-th most read row has ``C * (k + shift)^-exponent`` accesses.

    With a ``shift`` it is the Zipf-Mandelbrot law. See ``from_weights`` for the other arguments.
    """
    weights = np.arange(1, num_embeddings + 1, dtype=np.float64)
    weights += shift
    # Relative to the first weight, so that large exponents do not underflow to 0.
    weights /= weights[0]
    np.power(weights, -exponent, out=weights)
    return from_weights(table, weights, length, seed=seed, features=features)


def from_weights(
    table: str,
    weights: NDArray[np.float64],
    length: float,
    *,
    num_embeddings: int | None = None,
    seed: int | None = None,
    features: tuple[str, ...] = (),
) -> TableAccess:
    """Return accesses in proportion to ``weights``.

    Args:
        table: name of the table.
        weights: float64 ``[known]``, non-increasing.
        length: L, accesses per sample.
        num_embeddings: number of rows of the table, by default the number of weights.
        seed: seed of a random assignment of weights to rows; None keeps the order, so that row 0
            is read most.
        features: features that look the table up, by default one with the table's name.
    """
    if num_embeddings is None:
        num_embeddings = len(weights)
    accesses = weights * (length / float(weights.sum()))
    if seed is None:
        rows = np.arange(len(weights))
    else:
        rows = np.random.default_rng(seed).permutation(num_embeddings)[: len(weights)]
    total = float(accesses.sum())
    return TableAccess(table, features or (table,), num_embeddings, 1, rows, accesses, total)
