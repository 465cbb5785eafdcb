"""Delta checkpoints, with only the table rows that changed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.runtime.rank_agreement import from_rank_0, together
from recd_plugins.sharding.changed_rows import ChangedRows
from recd_plugins.training.checkpoint_dcp import (
    read_metadata,
)
from recd_plugins.training.checkpoint_files import (
    MANIFEST,
    DeltaOf,
    chain_of,
    digest_of,
)
from recd_plugins.training.checkpoint_rows import (
    RowTensors,
    row_tensors,
    tensors_of,
)
from recd_plugins.training.checkpoint_state import common_name


class Deltas:
    """Decides which checkpoints are deltas, and what they contain.

    All ranks must call each method together.
    """

    def __init__(self, folder: Path, full_every: int) -> None:
        self._folder, self._full_every = folder, full_every
        self._consumer = f"checkpoints of {folder}"
        self._tracker: ChangedRows | None = None
        self._model: weakref.ref[nn.Module] | None = None
        # Whether tracking began during training. Lookups before that may change rows after it.
        self._is_late = False
        # The checkpoint since which rows are tracked: path, digest of its manifest, number of
        # checkpoints that it consists of, and names of its tensors.
        self._last: tuple[Path, str, int, set[str]] | None = None

    def begin(
        self, dmp: DistributedModelParallel, document: Mapping[str, Any], final: Path
    ) -> tuple[DeltaOf | None, list[tuple[RowTensors, Tensor]]]:
        """Return the next delta's link to the last checkpoint, and this rank's changed rows.

        The link is None if the next checkpoint must be full.
        """
        last, self._last = self._last, None  # if saving fails, the next one is full
        if self._full_every == 1:
            return None, []
        tracker = self._tracker
        if tracker is None or self._model is None or self._model() is not dmp.module:
            self._track(dmp)
            self._is_late = True
            return None, []
        changed = tracker.take(self._consumer)
        if last is None or last[2] >= self._full_every or last[0] == final:
            return None, []
        path, sha256, _, known = last
        if not from_rank_0(_has_manifest(path, sha256)):
            return None, []
        tables = [
            (found, rows)
            for name, rows in changed.items()
            if (found := row_tensors(document, common_name(name))) is not None
        ]
        # A tensor must have equal shards as its table on all ranks, and be in the last checkpoint.
        weight_of = {name: w for table, _ in tables for name, w in table.names.items()}
        others = {name for table, _ in tables for name in table.mismatched}
        others |= {
            name
            for name, each in tensors_of(document).items()
            if isinstance(each, ShardedTensor) and each.local_shards() and name not in weight_of
        }
        told = together(lambda: (weight_of, others))
        weight_of = {name: w for names, _ in told for name, w in names.items()}
        fitting = known.intersection(weight_of).difference(*(whole for _, whole in told))
        by_rows = {name for name in fitting if weight_of[name] in fitting}
        kept = [(table.only(by_rows), rows) for table, rows in tables]
        delta = DeltaOf(path.name, sha256, tuple(sorted(by_rows)))
        return delta, [(table, rows) for table, rows in kept if table.tensors]

    def saved(self, path: Path, document: Mapping[str, Any]) -> None:
        """Track changes since a checkpoint that was saved."""
        if self._full_every > 1 and not self._is_late:
            names = together(lambda: set(tensors_of(document)))
            self._last = *_state_of(path), set().union(*names)
        self._is_late = False

    def loaded(self, path: Path | None, dmp: DistributedModelParallel) -> None:
        """Track changes since a checkpoint that was loaded, or since the start without one."""
        if self._full_every > 1:
            self._track(dmp)
            if path is not None:
                self._last = *_state_of(path), set(read_metadata(path).state_dict_metadata)

    def _track(self, dmp: DistributedModelParallel) -> None:
        self._tracker, self._model = ChangedRows.of(dmp, self._consumer), weakref.ref(dmp.module)


def _state_of(path: Path) -> tuple[Path, str, int]:
    """Return rank 0's view: path, digest of the manifest, number of checkpoints in the chain."""
    sha256, links = together(
        lambda: (
            (digest_of(path / MANIFEST).sha256, len(chain_of(path)))
            if dist.get_rank() == 0
            else ("", 0)
        )
    )[0]
    return path, sha256, links


def _has_manifest(path: Path, sha256: str) -> bool:
    return (path / MANIFEST).exists() and digest_of(path / MANIFEST).sha256 == sha256
