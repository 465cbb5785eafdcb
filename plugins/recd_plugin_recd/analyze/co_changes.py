"""Features that change in the same rows, which can share one inverse lookup."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: Share of the changes of two features that coincide, from which they form a group.
MIN_COINCIDENCE = 0.95


class CoChanges:
    """Counts in how many rows each two features change together."""

    def __init__(self, features: Sequence[str]) -> None:
        self._features = tuple(features)
        self._together = np.zeros((len(self._features),) * 2)

    def add(self, changed: NDArray[np.bool_]) -> None:
        """Add rows: bool ``[num_features, rows]``, whether a row is not the session's last one."""
        flags = changed.astype(np.float32)
        self._together += flags @ flags.T

    def groups(self, among: Sequence[str]) -> list[tuple[str, ...]]:
        """The features of ``among``, those together that change together; in their order.

        A feature joins the first group with whose first feature nearly all its changes coincide.
        """
        groups: list[list[str]] = []
        for name in among:
            for group in groups:
                if self._coincidence(group[0], name) >= MIN_COINCIDENCE:
                    group.append(name)
                    break
            else:
                groups.append([name])
        return [tuple(group) for group in groups]

    def _coincidence(self, one: str, other: str) -> float:
        """Rows in which both change over rows in which either does."""
        i, j = self._features.index(one), self._features.index(other)
        both = self._together[i, j]
        either = self._together[i, i] + self._together[j, j] - both
        return float(both / either) if either else 1.0
