"""Writes the rows of this rank's table shards for serving, as Parquet files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recd_plugins.api import file_utils

#: Id of a row that no id has.
_FREE = -1


class RowFiles:
    """Writes all rows, or changed rows, of the tables of a model's state dict.

    Columns of a file are ``row`` (of the table) and ``weights``. Tables that map ids to rows also
    have ``id``, and ``removed``, the id that had the row in the previous version. -1 stands for no
    id.

    Args:
        indices: for each table weight the name of its index's ids in the state dict, or None.
        rank: this rank.
    """

    def __init__(self, indices: Mapping[str, str | None], rank: int) -> None:
        self._indices, self._rank = indices, rank
        self._ids: dict[str, Tensor] = {}  # published, by table

    def write(
        self, folder: Path, state: Mapping[str, Any], changed: Mapping[str, Tensor] | None
    ) -> dict[str, list[dict[str, Any]]]:
        """Write the rows of this rank. Return the files of each table.

        Args:
            folder: folder to write to.
            state: state dict of the sharded model.
            changed: changed rows of each table, for a delta. Tables that are not in it are
                written whole. None writes all rows.
        """
        written: dict[str, list[dict[str, Any]]] = {}
        for number, (name, index) in enumerate(self._indices.items()):
            weights = state[name]
            if not isinstance(weights, ShardedTensor):
                continue  # replicated, so it is one of the dense weights
            files = written[name] = []
            for part, shard in enumerate(weights.local_shards()):
                first, column = shard.metadata.shard_offsets
                rows = None if changed is None else changed.get(name)
                if rows is not None:
                    rows = rows[(rows >= first) & (rows < first + shard.tensor.shape[0])]
                columns: dict[str, Any] = {}
                if index is not None:
                    rows, columns = self._of_ids(name, state[index], rows, changed is None)
                if rows is None:
                    rows = torch.arange(first, first + shard.tensor.shape[0])
                    values = shard.tensor.detach()
                else:
                    values = shard.tensor.detach()[(rows - first).to(shard.tensor.device)]
                flat = pa.array(values.cpu().float().reshape(-1).numpy())
                lists = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
                table = pa.table({"row": rows.numpy(), **columns, "weights": lists})
                file = f"{number}-{self._rank}-{part}.parquet"
                with file_utils.new_file(folder / file) as path:
                    # Weights hardly repeat, so a dictionary would cost time and save nothing.
                    pq.write_table(table, path, compression="zstd", use_dictionary=False)
                files.append({"file": file, "column": column, "sha256": digest(folder / file)})
        return written

    def published(self, state: Mapping[str, Any]) -> None:
        """Keep the ids of this version, to find the ids that the next version adds and removes."""
        for name, index in self._indices.items():
            if index is not None:
                for shard in state[index].local_shards():
                    self._ids[name] = shard.tensor.clone()

    def _of_ids(
        self, name: str, index: Any, changed: Tensor | None, is_base: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the rows to publish of a table that maps ids to rows, and the columns of ids."""
        (shard,) = index.local_shards()
        ids = shard.tensor
        first = shard.metadata.shard_offsets[0]
        rows = first + torch.arange(len(ids))
        removed = torch.full_like(ids, _FREE)
        chosen = ids != _FREE
        if not is_base:
            before = self._ids[name]
            differs = ids != before
            removed[differs] = before[differs]
            if changed is not None:
                trained = torch.zeros(len(ids), dtype=torch.bool)
                trained[changed - first] = True
                chosen &= trained
            chosen |= differs
        return rows[chosen], {"id": ids[chosen].numpy(), "removed": removed[chosen].numpy()}


def dense_file(path: Path, state: Mapping[str, Any], names: Iterator[str]) -> str:
    """Write the named tensors to an npz file. Return its SHA-256 digest."""
    arrays = {}
    for name in names:
        value = state[name].detach().cpu()
        arrays[name] = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    with file_utils.new_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)
    return digest(path)


def digest(path: Path) -> str:
    """Return the SHA-256 digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
