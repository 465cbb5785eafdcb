"""The callback ``dynamic.eviction_log``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from recd_plugins.api import Callback, PluginOptions, RunEnd, RunInterruption, RunStart, file_utils

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

# Number of evicted ids after which the next step writes a file.
_WAITING = 1 << 20


class EvictionLog(Callback):
    """Writes the ids that dynamic tables evict to Parquet files with columns step, table and id.

    Each rank writes a file per checkpoint, per million evicted ids, and at the end of the run.
    """

    name = "dynamic.eviction_log"
    free_options = frozenset({"folder"})

    class Options(PluginOptions):
        """Folder of the logs."""

        folder: Path = Field(
            description="Folder of the files evicted-STEP-RANK.parquet. A run removes the files of "
            "steps after its start, which it trains again."
        )

    options: Options

    def on_start(self, start: RunStart) -> None:
        from recd_plugin_dynamic.runtime.sharded import rank_indices

        self._rank, self._step = start.rank, start.step
        self._waiting: list[pa.RecordBatch] = []
        for path in self.options.folder.glob("evicted-*-*.parquet"):
            if int(path.name.split("-")[1]) > start.step:
                path.unlink(missing_ok=True)
        assert start.model is not None
        for table, index in rank_indices(start.model):
            index.on_eviction = partial(self._evicted, table)

    def state_dict(self) -> Mapping[str, Any]:
        """Write the ids evicted since the last file, because each checkpoint calls this method."""
        self._write()
        return {}

    def on_interrupt(self, interruption: RunInterruption) -> None:  # noqa: ARG002
        self._write()

    def on_end(self, end: RunEnd) -> None:  # noqa: ARG002
        self._write()

    def _evicted(self, table: str, ids: NDArray[np.int64], step: int) -> None:
        import pyarrow as pa

        if step > self._step and sum(map(len, self._waiting)) > _WAITING:
            self._write()
        self._step = step
        columns = {
            "step": pa.repeat(pa.scalar(step), len(ids)),
            "table": pa.repeat(pa.scalar(table), len(ids)),
            "id": pa.array(ids),
        }
        self._waiting.append(pa.RecordBatch.from_pydict(columns))

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._waiting:
            path = self.options.folder / f"evicted-{self._step:09}-{self._rank:05}.parquet"
            with file_utils.new_file(path) as temporary:
                pq.write_table(pa.Table.from_batches(self._waiting), temporary)
            self._waiting.clear()
