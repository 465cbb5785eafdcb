"""Access profiles of tables whose rows are read as a distribution says.

Each has seen one sample, so that accesses are probabilities, and their sum is ``length``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recd_plugins.access.table_access import TableAccess
from recd_plugins.errors import DataError


def zipf(
    table: str,
    num_embeddings: int,
    length: float,
    exponent: float,
    *,
    shift: float = 0.0,
    cap: float | None = None,
    seed: int | None = None,
    features: tuple[str, ...] = (),
) -> TableAccess:
    """The k-th most read row is read ``C * (k + shift)^-exponent`` times a sample, k from 1.

    Zipf's law; with a ``shift`` Zipf's and Mandelbrot's. ``from_weights`` describes the other
    arguments.
    """
    weights = np.arange(1, num_embeddings + 1, dtype=np.float64)
    weights += shift
    # Relative to the first, so that large exponents do not end in zeros.
    weights /= weights[0]
    np.power(weights, -exponent, out=weights)
    return from_weights(table, weights, length, cap=cap, seed=seed, features=features)


def exponential(
    table: str,
    num_embeddings: int,
    length: float,
    scale: float,
    *,
    cap: float | None = None,
    seed: int | None = None,
    features: tuple[str, ...] = (),
) -> TableAccess:
    """The k-th most read row is read ``C * exp(-(k - 1) / scale)`` times a sample, k from 1.

    ``from_weights`` describes the other arguments.
    """
    weights = np.exp(np.arange(num_embeddings, dtype=np.float64) / -scale)
    return from_weights(table, weights, length, cap=cap, seed=seed, features=features)


def half_normal(
    table: str,
    num_embeddings: int,
    length: float,
    scale: float,
    *,
    cap: float | None = None,
    seed: int | None = None,
    features: tuple[str, ...] = (),
) -> TableAccess:
    """The k-th most read row is read ``C * exp(-((k - 1) / scale)^2 / 2)`` times a sample.

    ``from_weights`` describes the other arguments.
    """
    with np.errstate(over="ignore"):
        weights = np.exp((np.arange(num_embeddings, dtype=np.float64) / scale) ** 2 / -2)
    return from_weights(table, weights, length, cap=cap, seed=seed, features=features)


def from_weights(
    table: str,
    weights: NDArray[np.float64],
    length: float,
    *,
    num_embeddings: int | None = None,
    cap: float | None = None,
    seed: int | None = None,
    features: tuple[str, ...] = (),
) -> TableAccess:
    """Rows that are read in proportion to ``weights``.

    Args:
        table: its name.
        weights: float64 ``[known]``, non-increasing, some above 0.
        length: accesses of a sample: L.
        num_embeddings: rows of the table, those beyond ``weights`` are never read; as many as there
            are weights without it.
        cap: no row is read more than so many times a sample: ``p = min(cap, C * weight)``, with C
            chosen so that the sum is ``length``.
        seed: which row is read how often is drawn with it; without one, row 0 is read most, row 1
            next, and so on.
        features: that look it up; one of the table's name without them.

    Raises:
        DataError: ``length`` is out of reach under ``cap``.
    """
    if num_embeddings is None:
        num_embeddings = len(weights)
    accesses = _scaled(table, weights, length, cap)
    if seed is None:
        rows = np.arange(len(weights))
    else:
        rows = np.random.default_rng(seed).permutation(num_embeddings)[: len(weights)]
    total = float(accesses.sum())
    return TableAccess(table, features or (table,), num_embeddings, 1, rows, accesses, total)


def _scaled(
    table: str, weights: NDArray[np.float64], length: float, cap: float | None
) -> NDArray[np.float64]:
    if cap is None:
        return weights * (length / float(weights.sum()))
    read = int(np.count_nonzero(weights))
    if length > cap * read:
        raise DataError(
            f"table {table}: {read:,} rows that are read at most {cap:g} times a sample cannot "
            f"have {length:g} accesses; lower the length, or raise the cap"
        )
    # The number of capped rows is the least for which the next row stays below the cap.
    most = min(int(length / cap), len(weights) - 1) + 1
    rest = float(weights[most:].sum()) + np.cumsum(weights[:most][::-1])[::-1]
    fits = (length - cap * np.arange(most)) * weights[:most] <= cap * rest
    capped = int(fits.argmax()) if fits.any() else most
    accesses = np.full(len(weights), cap)
    if capped < len(weights):
        left = length - cap * capped
        tail = weights[capped:]
        accesses[capped:] = tail * (left / float(tail.sum()))
    return accesses
