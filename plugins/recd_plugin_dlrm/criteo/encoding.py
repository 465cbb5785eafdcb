"""Stored rows to what a model takes: dense features as floats, ids within their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_dlrm.criteo.rows import DENSE, LABEL, SPARSE, RawRows
from recd_plugins.api import DataError

DenseWord = Literal["log1p", "stored"]
Int64s = NDArray[np.int64]

_FIELDS = (
    *(pa.field(name, pa.int64()) for name in SPARSE),
    *(pa.field(name, pa.float32()) for name in DENSE),
    pa.field(LABEL, pa.int8()),
)
SCHEMA = pa.schema(_FIELDS)


class IdCoder(Protocol):
    """Ids of one feature to those of its table."""

    def __call__(self, feature: int, ids: Int64s) -> Int64s:
        """Of the feature by its number."""


class Buckets:
    """Ids modulo the rows of their table, as ``--max-ind-range`` of DLRM has it.

    Args:
        buckets: of every feature, or of each by name or pattern; the first match counts.

    Raises:
        DataError: a pattern matches no feature, or a feature no pattern.
    """

    def __init__(self, buckets: int | Mapping[str, int]) -> None:
        by_pattern = {"*": buckets} if isinstance(buckets, int) else dict(buckets)
        for pattern in by_pattern:
            if not any(fnmatchcase(name, pattern) for name in SPARSE):
                raise DataError(
                    f"{pattern} of option buckets matches no feature; they are {SPARSE[0]} to "
                    f"{SPARSE[-1]}"
                )
        self.sizes = [_first_match(name, by_pattern) for name in SPARSE]

    def __call__(self, feature: int, ids: Int64s) -> Int64s:
        return np.asarray(ids % self.sizes[feature])


def raw_ids(feature: int, ids: Int64s) -> Int64s:  # noqa: ARG001
    """Ids as they are stored: for a preprocessing that hashes them."""
    return ids


def encode(rows: RawRows, coder: IdCoder, dense: DenseWord | None) -> pa.RecordBatch:
    """Rows with the columns and types of ``SCHEMA``."""
    columns: Sequence[NDArray[Any]] = [
        *(coder(feature, ids) for feature, ids in enumerate(rows.sparse)),
        *(_floats(values, dense) for values in rows.dense),
        rows.labels,
    ]
    return pa.record_batch(list(map(pa.array, columns)), schema=SCHEMA)


def _floats(values: NDArray[Any], dense: DenseWord | None) -> NDArray[np.float32]:
    if dense is None:
        dense = "stored" if values.dtype.kind == "f" else "log1p"
    if dense == "stored":
        return values.astype(np.float32)
    # DLRM's data_utils.py: nothing is 0, so are negative numbers, and then log(x + 1) in float32.
    return np.log(np.maximum(values, 0).astype(np.float32) + np.float32(1))


def _first_match(name: str, by_pattern: Mapping[str, int]) -> int:
    for pattern, size in by_pattern.items():
        if fnmatchcase(name, pattern):
            return size
    raise DataError(f"option buckets says nothing of {name}; a pattern * takes all others")
