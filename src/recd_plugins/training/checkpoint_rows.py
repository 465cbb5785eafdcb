"""Writes and reads the changed rows of tables in delta checkpoints, as Parquet files.

Each rank writes one file per local table shard. A file has the column ``row`` with row numbers of
the table, and one column per tensor, such as ``weight`` and ``momentum1``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard

from recd_plugins.training.checkpoint_files import MANIFEST, ROWS, chain_of, row_files

_NOTE = b"recd.changed_rows"
_ROW = "row"
_STORED = (torch.float32, torch.float64, torch.int32, torch.int64)
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16}


@dataclass(frozen=True)
class _Column:
    """One tensor of a file: its name in checkpoints, and the place of the shard in the tensor.

    Attributes:
        shift: difference between rows of the tensor and rows of the table. It is not 0 for
            row-wise optimizer state of column shards.
    """

    tensor: str
    dtype: str
    shift: int
    first_column: int


@dataclass(frozen=True)
class RowTensors:
    """The weight of a table, and state with one entry per row.

    Attributes:
        table: name of the table.
        tensors: maps the column in the Parquet file to (name in checkpoints, tensor). The weight is
            the first.
    """

    table: str
    tensors: Mapping[str, tuple[str, ShardedTensor]]

    @property
    def names(self) -> dict[str, str]:
        """Return a dict from each tensor's name in checkpoints to the name of the weight."""
        weight, *_ = (name for name, _ in self.tensors.values())
        return {name: weight for name, _ in self.tensors.values()}

    @property
    def mismatched(self) -> set[str]:
        """Return the names of tensors with another number of local rows than the weight."""
        (_, weight), *_ = self.tensors.values()
        rows = _local_rows(weight)
        return {name for name, each in self.tensors.values() if _local_rows(each) != rows}

    def only(self, names: Collection[str]) -> RowTensors:
        """Return a copy with only the tensors with these names."""
        kept = {column: each for column, each in self.tensors.items() if each[0] in names}
        return RowTensors(self.table, kept)


def _local_rows(tensor: ShardedTensor) -> list[int]:
    return [len(shard.tensor) for shard in tensor.local_shards()]


def tensors_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict from name in checkpoints to tensor, for weights and optimizer state."""
    found = {f"model.{name}": each for name, each in document["model"].items()}
    for name, values in document.get("optimizer", {}).get("state", {}).items():
        found.update({f"optimizer.state.{name}.{key}": each for key, each in values.items()})
    return found


def row_tensors(document: Mapping[str, Any], weight: str) -> RowTensors | None:
    """Return the row-wise tensors of the table with this weight; None if it is not sharded.

    Includes buffers ``row_state.TABLE.NAME`` of the table's module.
    """
    if not isinstance(sharded := document["model"].get(weight), ShardedTensor):
        return None
    *module, _, table, _ = weight.split(".")
    tensors = {"weight": (f"model.{weight}", sharded)}
    buffers = ".".join([*module, "row_state", table, ""])
    for name, value in document["model"].items():
        if name.startswith(buffers):
            tensors[name.removeprefix(buffers)] = (f"model.{name}", value)
    for key, value in document["optimizer"]["state"].get(weight, {}).items():
        if isinstance(value, ShardedTensor):
            column = key.removeprefix(f"{table}.")
            tensors[column] = (f"optimizer.state.{weight}.{key}", value)
    return RowTensors(table, tensors)


def document_without(document: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a checkpoint's contents (``model``, ``optimizer``, ...) without some tensors.

    ``names`` are the names that ``tensors_of`` returns.
    """
    model = {name: each for name, each in document["model"].items() if f"model.{name}" not in names}
    state = {}
    for name, values in document["optimizer"]["state"].items():
        prefix = f"optimizer.state.{name}."
        if kept := {key: each for key, each in values.items() if prefix + key not in names}:
            state[name] = kept
    return {**document, "model": model, "optimizer": {**document["optimizer"], "state": state}}


def write_rows(folder: Path, changed: Sequence[tuple[RowTensors, Tensor]]) -> None:
    """Write this rank's changed rows.

    Args:
        folder: folder of the checkpoint.
        changed: tables with the changed rows of this rank's shards, ascending int64.
    """
    number = count()
    for table, rows in changed:
        weight, *_ = (tensor for _, tensor in table.tensors.values())
        for index, shard in enumerate(weight.local_shards()):
            first = shard.metadata.shard_offsets[0]
            local = rows[(rows >= first) & (rows < first + len(shard.tensor))] - first
            if len(local):
                path = folder / f"rows-{dist.get_rank()}-{next(number)}{ROWS}"
                shards = {
                    column: (name, each.local_shards()[index])
                    for column, (name, each) in table.tensors.items()
                }
                _write_shard(path, table.table, local, shards)


def _write_shard(
    path: Path, table: str, local: Tensor, shards: Mapping[str, tuple[str, Shard]]
) -> None:
    weight, *_ = (shard for _, shard in shards.values())
    first_row = weight.metadata.shard_offsets[0]
    arrays: dict[str, Any] = {_ROW: (local + first_row).numpy()}
    encodings, columns = {_ROW: "DELTA_BINARY_PACKED"}, {}
    for column, (name, shard) in shards.items():
        values = shard.tensor.detach().index_select(0, local.to(shard.tensor.device)).cpu()
        dtype = str(values.dtype).removeprefix("torch.")
        if values.dtype not in _STORED:
            values = values.view(_AS_INTEGERS[values.element_size()])
        arrays[column] = pa.array(values.reshape(-1).numpy())
        if values.dim() > 1:
            arrays[column] = pa.FixedSizeListArray.from_arrays(arrays[column], values.shape[1])
        encodings[column if values.dim() == 1 else f"{column}.list.element"] = "BYTE_STREAM_SPLIT"
        row, *more = shard.metadata.shard_offsets
        columns[column] = asdict(_Column(name, dtype, row - first_row, more[0] if more else 0))
    note = {
        "table": table,
        "rows": [first_row, first_row + len(weight.tensor)],
        "columns": columns,
    }
    pq.write_table(
        pa.table(arrays).replace_schema_metadata({_NOTE: json.dumps(note)}),
        path,
        compression="zstd",
        use_dictionary=False,
        column_encoding=encodings,
        write_statistics=False,
    )


def read_rows(checkpoint: Path, tensors: Mapping[str, Any]) -> None:
    """Replace the rows that the deltas of a checkpoint have changed since the full one.

    Args:
        checkpoint: a full checkpoint or a delta, whose files are undamaged.
        tensors: tensors and ShardedTensors by their names in checkpoints, with the values of the
            checkpoint where each tensor was last saved whole. They are changed in place.
    """
    if not (checkpoint / MANIFEST).exists():  # a folder that only DCP has written
        return
    places = {name: _places(each) for name, each in tensors.items()}
    for path, names in row_files(chain_of(checkpoint)):
        wanted = {name: places[name] for name in names & places.keys()}
        if any(wanted.values()):
            _read_shard(path, wanted)


def _places(tensor: Any) -> list[tuple[Tensor, list[int]]]:
    """Return the local parts of a tensor with their offsets."""
    if isinstance(tensor, ShardedTensor):
        return [(each.tensor, each.metadata.shard_offsets) for each in tensor.local_shards()]
    return [(tensor, [0] * tensor.dim())] if isinstance(tensor, Tensor) else []


@torch.no_grad()
def _read_shard(path: Path, wanted: Mapping[str, list[tuple[Tensor, list[int]]]]) -> None:
    with pq.ParquetFile(path) as file:
        note = json.loads(file.schema_arrow.metadata[_NOTE])
        columns = {key: _Column(**each) for key, each in note["columns"].items()}
        needed = {}
        for key, column in columns.items():
            start, end = (row + column.shift for row in note["rows"])
            parts = wanted.get(column.tensor, ())
            overlapping = [p for p in parts if p[1][0] < end and start < p[1][0] + len(p[0])]
            if overlapping:
                needed[key] = overlapping
        if not needed:
            return
        table = file.read([_ROW, *needed])
    rows = torch.from_numpy(table[_ROW].to_numpy().copy())
    for key, parts in needed.items():
        column = columns[key]
        values = _values(table[key].combine_chunks(), getattr(torch, column.dtype))
        for tensor, first in parts:
            _copy_rows(tensor.data, first, values, rows + column.shift, column.first_column)


def _values(array: Any, dtype: torch.dtype) -> Tensor:
    if pa.types.is_fixed_size_list(array.type):
        width = array.type.list_size
        return torch.from_numpy(array.flatten().to_numpy().copy()).view(dtype).view(-1, width)
    return torch.from_numpy(array.to_numpy().copy()).view(dtype)


def _copy_rows(
    tensor: Tensor, first: Sequence[int], values: Tensor, rows: Tensor, first_column: int
) -> None:
    """Copy rows of a tensor that are in its part ``tensor``, which starts at ``first``."""
    here = (rows >= first[0]) & (rows < first[0] + len(tensor))
    local, values = rows[here] - first[0], values[here]
    if tensor.dim() > 1:
        start = max(first[1], first_column)
        end = min(first[1] + tensor.shape[1], first_column + values.shape[1])
        if start >= end:
            return
        tensor = tensor[:, start - first[1] : end - first[1]]
        values = values[:, start - first_column : end - first_column]
    tensor.index_copy_(0, local.to(tensor.device), values.to(tensor.device))
