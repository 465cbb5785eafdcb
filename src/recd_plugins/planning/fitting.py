"""Costs fitted to what was measured."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray


def fit_costs(
    work: NDArray[np.float64], measured: NDArray[np.float64], *, least: float
) -> NDArray[np.float64]:
    """Non-negative costs with the least squares of the relative errors of ``work @ costs``.

    With few columns every set of those that are above zero can be tried; of sets that are equally
    good the smallest counts.

    Args:
        work: ``[measurements, costs]``.
        measured: ``[measurements]``.
        least: errors are relative to what was measured, or to this where that is less.

    Returns:
        ``[costs]``.
    """
    weights = 1 / np.maximum(measured, least)
    scaled, target = work * weights[:, None], measured * weights
    units = np.abs(scaled).max(axis=0)
    columns = [column for column in range(work.shape[1]) if units[column]]
    best, least_error = np.zeros(work.shape[1]), float(np.square(target).sum())
    for size in range(1, len(columns) + 1):
        for chosen in combinations(columns, size):
            part = list(chosen)
            solution, *_ = np.linalg.lstsq(scaled[:, part] / units[part], target, rcond=1e-6)
            if solution.min() < 0:
                continue
            error = float(np.square(scaled[:, part] / units[part] @ solution - target).sum())
            if error < least_error * (1 - 1e-6):
                least_error = error
                best = np.zeros(work.shape[1])
                best[part] = solution / units[part]
    return best
