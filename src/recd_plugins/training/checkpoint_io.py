"""DCP for checkpoints: a full disk is told when writing, and reading runs nothing from a file."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

# Private, as no public name has it; so in torch 2.11 to 2.14.
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from recd_plugins.errors import RecdError
from recd_plugins.training.checkpoint_files.errors import DamagedError
from recd_plugins.training.checkpoint_files.metadata import Contents, Tensor

# How torch.load(weights_only=True) names what it refuses.
_NAMED = re.compile(r"GLOBAL (\S+)")
_STATE = "optimizer.state."


class TellingWriter(FileSystemWriter):
    """DCP's writer, whose errors say why a file cannot be written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As DCP's.

        Raises:
            OSError: what stood behind the complaint of ``torch.save`` that bytes are missing.
        """
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise cause from None


class SafeReader(FileSystemReader):
    """DCP's reader with metadata that was read already, by this package.

    Args:
        path: the checkpoint.
        contents: what its ``.metadata`` says.
    """

    def __init__(self, path: Path, contents: Contents) -> None:
        super().__init__(path)
        self._contents = contents

    def read_metadata(self) -> Metadata:
        """What DCP's own would have unpickled."""
        return Metadata(
            state_dict_metadata={
                name: BytesStorageMetadata() if entry is None else _stored(entry)
                for name, entry in self._contents.entries.items()
            },
            storage_data={
                MetadataIndex(name, offset, number): _StorageInfo(
                    place.file, place.offset, place.length
                )
                for (name, offset, number), place in self._contents.places.items()
            },
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As DCP's, file by file.

        Raises:
            DamagedError: a file holds a class that no checkpoint needs; names both.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except pickle.UnpicklingError as error:
                path = Path(self.path) / name
                found = _NAMED.search(str(error))
                if found is None:
                    raise DamagedError(f"{path}: is damaged ({_first_line(error)})") from error
                name = found[1] if "." in found[1] else f"builtins.{found[1]}"
                raise DamagedError(
                    f"{path}: names {name}, which no checkpoint needs; nothing of it was run. "
                    "Take no checkpoint from where this one is from"
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, for entries of the same type only, and bytes of plain values only.

    Args:
        trained: parameters whose state has to be taken up, as checkpoints name them.
    """

    def __init__(self, trained: Collection[str] = ()) -> None:
        self._trained = tuple(f"{_STATE}{name}." for name in trained)
        # Flattened, a table without rows on this rank would be missing from its state, which
        # torch takes for a checkpoint of before 2.4; one without optimizer state then fails.
        super().__init__(flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        """As DCP's, which would pass over what the model lacks, and cast to its dtypes."""
        assert self.metadata is not None, "set_up_planner came before"
        for name, stored in self.metadata.state_dict_metadata.items():
            if name.startswith("model.") and name not in self.state_dict:
                raise ValueError(f"{name} is there, and the model has no such parameter")
            dtype = getattr(self.state_dict.get(name), "dtype", None)
            if isinstance(stored, TensorStorageMetadata) and dtype not in (
                None,
                stored.properties.dtype,
            ):
                raise ValueError(f"{name} is {stored.properties.dtype} there and {dtype} here")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As DCP's, which would pass over what the optimizer lacks.

        Each rank has the state of its own tables alone, so only all of them together lack it.
        """
        read = {item.storage_index.fqn for plan in global_plan for item in plan.items}
        for name in self.metadata.state_dict_metadata if self.metadata else ():
            if name.startswith(self._trained) and name not in read:
                raise ValueError(f"{name} is there, and the optimizer has no such state")
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As DCP's, which would unpickle anything: it gets what was read safely."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class SafeSavePlanner(DefaultSavePlanner):
    """DCP's planner, for values that can be loaded again."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """As DCP's.

        Raises:
            RecdError: a value that is no tensor is of a class that no checkpoint may name.
        """
        written = super().transform_object(write_item, object)
        if write_item.type == WriteItemType.BYTE_IO:
            try:
                torch.load(io.BytesIO(written.getvalue()), weights_only=True)
            except pickle.UnpicklingError as error:
                raise RecdError(
                    f"{write_item.index.fqn}: is a {type(object).__qualname__}, which a "
                    "checkpoint cannot hold; keep tensors and plain values in state dicts"
                ) from error
        return written


def _stored(entry: Tensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, entry.dtype)),
        torch.Size(entry.size),
        [
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for chunk in entry.chunks
        ],
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
