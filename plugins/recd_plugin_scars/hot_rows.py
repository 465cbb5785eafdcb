"""Which samples are hot: every row that they look up is one of the hot rows of its table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from recd_plugins.api import Lookups, Rows


@dataclass(frozen=True, eq=False)
class HotTable:
    """The hot rows of a table.

    Attributes:
        features: that look it up.
        num_embeddings: rows of the table.
        rows: int64: the hot ones, in any order.
    """

    features: tuple[str, ...]
    num_embeddings: int
    rows: NDArray[np.int64]


class HotRows:
    """Tells hot samples from normal ones.

    Args:
        tables: by name; what is looked up in other tables does not matter.
        lookups: what samples look up.
    """

    def __init__(self, tables: Mapping[str, HotTable], lookups: Lookups) -> None:
        self._lookups = lookups
        self._features: dict[str, list[tuple[NDArray[np.uint8], int]]] = {}
        content = hashlib.sha256()
        for name, table in tables.items():
            hot = np.zeros(table.num_embeddings, np.bool_)
            hot[table.rows] = True
            bits = np.packbits(hot, bitorder="little")
            content.update(f"{name} {table.features} {table.num_embeddings} ".encode())
            content.update(bits.tobytes())
            for feature in table.features:
                self._features.setdefault(feature, []).append((bits, table.num_embeddings))
        #: Sixteen hex digits that stand for the hot rows.
        self.digest = content.hexdigest()[:16]

    def samples(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of ``rows`` are hot, bool ``[num_rows]``. An id outside of its table is not.

        Raises:
            DataError: a feature is missing or damaged.
            PluginError: a step of preprocessing failed.
        """
        hot = np.ones(len(rows), np.bool_)
        for feature, found in self._lookups.of(rows, list(self._features)).items():
            for bits, num_embeddings in self._features[feature]:
                lists = _all_hot(found.ids, found.offsets, bits, np.uint64(num_embeddings))
                hot &= lists if found.inverse is None else lists[found.inverse]
        return hot


@numba.njit(cache=True, nogil=True)
def _all_hot(ids: Any, offsets: Any, bits: Any, num_embeddings: Any) -> Any:
    """Which lists hold hot ids alone. As unsigned, negative ids are large."""
    hot = np.ones(len(offsets) - 1, np.bool_)
    for row in range(len(hot)):
        for at in range(offsets[row], offsets[row + 1]):
            id_ = np.uint64(ids[at])
            if id_ >= num_embeddings or not (bits[id_ >> np.uint64(3)] >> (id_ & np.uint64(7))) & 1:
                hot[row] = False
                break
    return hot
