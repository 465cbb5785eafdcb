"""How often each id of a feature occurs, counted while rows stream by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_dlrm.criteo.rows import SPARSE
from recd_plugins.api.files import new_file

Int64s = NDArray[np.int64]

# Ids that wait before they are sorted: sorting often costs time, seldom memory.
_FEWEST_WAITING = 1 << 18


class IdCounts:
    """Counts of one feature.

    Attributes:
        ids: int64 ``[num_ids]``, sorted; complete after ``flush``.
        counts: how often, int64 ``[num_ids]``.
    """

    def __init__(self) -> None:
        self.ids: Int64s = np.empty(0, np.int64)
        self.counts: Int64s = np.empty(0, np.int64)
        self._waiting: list[Int64s] = []
        self._waiting_counts: list[Int64s] = []
        self._num_waiting = 0

    def add(self, ids: Int64s) -> None:
        """Count ids, in any order."""
        self.add_counted(*np.unique(ids, return_counts=True))

    def add_counted(self, ids: Int64s, counts: Int64s) -> None:
        """Add what was counted elsewhere."""
        self._waiting.append(ids)
        self._waiting_counts.append(counts)
        self._num_waiting += len(ids)
        if self._num_waiting > max(_FEWEST_WAITING, len(self.ids)):
            self.flush()

    def flush(self) -> None:
        """Sort in what waits."""
        ids = np.concatenate([self.ids, *self._waiting])
        counts = np.concatenate([self.counts, *self._waiting_counts])
        # Gone before the sort, which takes as much.
        self.ids = self.counts = np.empty(0, np.int64)
        self._waiting, self._waiting_counts, self._num_waiting = [], [], 0
        order = np.argsort(ids, kind="stable")
        ids, counts = ids[order], counts[order]
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
        self.ids = ids[starts]
        self.counts = np.add.reduceat(counts, starts) if len(starts) else counts


def write_arrays(path: Path, arrays: dict[str, Int64s], metadata: dict[bytes, bytes]) -> None:
    """Arrays of any lengths as one file that can be memory-mapped; appears when it is complete.

    Raises:
        RecdError: the place cannot be written.
    """
    columns = {
        name: pa.LargeListArray.from_arrays(pa.array([0, len(array)], pa.int64()), pa.array(array))
        for name, array in arrays.items()
    }
    batch = pa.record_batch(columns).replace_schema_metadata(metadata)
    with (
        new_file(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, batch.schema) as writer,
    ):
        writer.write_batch(batch)


def read_arrays(path: Path, provenance: bytes) -> dict[str, Int64s] | None:
    """What ``write_arrays`` wrote, memory-mapped; None where it is not there or other data."""
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            if (reader.schema.metadata or {}).get(b"provenance") != provenance:
                return None
            batch = reader.get_batch(0)
    except (OSError, pa.ArrowException):
        return None
    return {
        name: batch.column(name).values.to_numpy(zero_copy_only=True) for name in batch.schema.names
    }


def counted(features: Sequence[IdCounts]) -> dict[str, Int64s]:
    """Ids by the name of their feature, and under ``NAME_counts`` how often each occurs."""
    arrays = {}
    for name, feature in zip(SPARSE, features, strict=True):
        feature.flush()
        arrays[name], arrays[f"{name}_counts"] = feature.ids, feature.counts
    return arrays
