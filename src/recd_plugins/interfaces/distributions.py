"""Access profiles of tables computed from theoretical distributions, such as Zipf's law."""

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
    """Return the access counts of a table whose rows are accessed according to Zipf's law.

    The k-th most frequent row has accesses proportional to ``(k + shift)^-exponent``. A ``shift``
    above 0 gives the Zipf-Mandelbrot law. For the other arguments, see ``from_weights``.
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
    """Return the access counts of a table whose rows have accesses proportional to ``weights``.

    Args:
        table: name of the table.
        weights: float64 ``[known]``, non-increasing.
        length: mean number of accesses per sample.
        num_embeddings: number of rows of the table, by default the number of weights.
        seed: seed of a random assignment of weights to row ids; None keeps the order, so that row
            0 is the most frequent.
        features: features that look up the table, by default one with the table's name.
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
