"""Shapes of generated tables: which features a table has, how long they are, and when they change.

``papercal`` is the table of the RecD paper's characterisation (section 3). ``rm1``, ``rm2`` and
``rm3`` have the features of the models of its section 6.1: sequence features in groups that change
together, and about 100 features that are pooled element-wise and change one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

ShapeName = Literal["papercal", "rm1", "rm2", "rm3"]

NUM_ITEMS = 8


@dataclass(frozen=True)
class Feature:
    """One sparse feature. Features with the same ``clock`` change in the same rows.

    ``keep`` is the probability that a row has the list of the session's previous row.
    """

    name: str
    mean_length: int
    keep: float
    clock: int
    num_ids: int


@dataclass(frozen=True)
class TableColumns:
    """The columns of a generated table besides session, time and label.

    Attributes:
        features: lists of ids; the clocks are numbered from 0 in the order of the features.
        num_dense: ``dense_0`` and so on.
    """

    features: tuple[Feature, ...]
    num_dense: int

    @cached_property
    def keep(self) -> NDArray[np.float64]:
        """The probability that the clock stands still, by clock."""
        return np.array(list({feature.clock: feature.keep for feature in self.features}.values()))

    @property
    def num_session_dense(self) -> int:
        """The first so many dense features are the same in all rows of a session."""
        return (self.num_dense + 1) // 2

    @cached_property
    def schema(self) -> pa.Schema:
        """All columns of the table."""
        return pa.schema(
            [
                ("session_id", pa.int64()),
                ("ts", pa.int64()),
                ("label", pa.int8()),
                *((f"dense_{i}", pa.float32()) for i in range(self.num_dense)),
                *((feature.name, pa.list_(pa.int64())) for feature in self.features),
            ]
        )


@dataclass(frozen=True)
class _Sizes:
    """What differs between shapes.

    Attributes:
        groups: sequence features of each group.
        group_keeps: their ``keep``, by group.
        num_users: other features of the user.
        least_user_keep: of the first; the others have up to 0.07 more.
    """

    groups: tuple[int, ...]
    group_keeps: tuple[float, ...]
    num_users: int
    least_user_keep: float
    num_dense: int


# `keep` is such that the lists of each shape stand 5.4 times, as the paper's do.
_SIZES: dict[ShapeName, _Sizes] = {
    "papercal": _Sizes((3, 3, 3), (0.872, 0.842, 0.892), 23, 0.842, 13),
    "rm1": _Sizes((4, 3, 3, 3, 3), (0.872, 0.842, 0.892, 0.857, 0.877), 92, 0.836, 64),
    "rm2": _Sizes((6,), (0.868,), 92, 0.836, 64),
    "rm3": _Sizes((11,), (0.868,), 92, 0.836, 64),
}
_SEQUENCE_LENGTHS = (100, 60, 150)


def shape_of(name: ShapeName, scale: float = 1.0) -> TableColumns:
    """A shape by its name.

    Args:
        name: its name.
        scale: shortens the lists of ``rm1``, ``rm2`` and ``rm3`` to ``length_scale(scale)``.
    """
    sizes = _SIZES[name]

    def length(mean: float) -> int:
        return max(1, round(mean * length_scale(scale)))

    sequences = [
        Feature(
            f"seq_{group}_{i}",
            length(_SEQUENCE_LENGTHS[i % len(_SEQUENCE_LENGTHS)]),
            keep,
            group,
            2_000_000,
        )
        for group, (count, keep) in enumerate(zip(sizes.groups, sizes.group_keeps, strict=True))
        for i in range(count)
    ]
    # Lengths from 10 to 60; the order of `keep` is scrambled, so that it does not follow length.
    last = sizes.num_users - 1
    users = [
        Feature(
            f"usr_{i}",
            length(10 * 6 ** (i / last)),
            sizes.least_user_keep + 0.07 * (i * 7 % sizes.num_users) / last,
            len(sizes.groups) + i,
            1_000_000,
        )
        for i in range(sizes.num_users)
    ]
    item_clock = len(sizes.groups) + sizes.num_users
    items = [Feature(f"item_{i}", 1, 0.05, item_clock, 1_000_000) for i in range(NUM_ITEMS)]
    return TableColumns((*sequences, *users, *items), sizes.num_dense)


def length_scale(scale: float) -> float:
    """The fourth root: lists shrink less than widths, or little would be left of their share.

    The work that repeats, pooling and lookups, grows with length and width; the interaction, whose
    number of features stays, with width alone.
    """
    return float(scale**0.25)
