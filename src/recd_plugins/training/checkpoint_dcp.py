"""Reads torch.distributed.checkpoint (DCP) files without running code from them."""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

# Private in torch 2.11 to 2.14; there is no public name.
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
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
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from recd_plugins.interfaces.model_tables import embedding_modules
from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.text import did_you_mean, shortened
from recd_plugins.training.checkpoint_files import (
    MANIFEST,
    METADATA,
    DamagedError,
    chain_of,
    check_whole,
    read_delta,
)
from recd_plugins.training.checkpoint_rows import read_rows

_DCP = "torch.distributed.checkpoint.metadata"
#: Classes allowed in ``.metadata``: those written by torch 2.11 to 2.14 on Python 3.11 to 3.14.
ALLOWED = {
    *((_DCP, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_DCP, name) for name in ("TensorStorageMetadata", "TensorProperties")),
    *((_DCP, name) for name in ("ChunkStorageMetadata", "BytesStorageMetadata")),
    (_DCP, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    ("builtins", "getattr"),  # members of enums, by Python 3.11.0 to 3.11.3
}
DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("uint8", "int8", "int16", "int32", "int64", "bool", "complex64", "complex128"),
    }
)
_MODEL, _STATE = "model.", "optimizer.state."
# Early two-tower models kept replicated tables in these modules.
_COPIES = re.compile(r"(^|\.)copies(\.embedding_bags\.)")


class _RefusedError(pickle.UnpicklingError):
    """Raised if a pickle contains a class that is not allowed; the message is its full name."""


class _Record:
    """Placeholder for an unpickled object that stores arguments and state but runs no code."""

    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> _Record:
        record = object.__new__(cls)
        record.args = args
        return record

    def __init__(self, *_: Any) -> None:
        """Ignore the arguments, which ``__new__`` already stored."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Records(pickle.Unpickler):
    """Unpickler that creates a placeholder (``_Record``) for each pickled object."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._classes: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) not in ALLOWED:
            raise _RefusedError(f"{module}.{name}")
        return self._classes.setdefault(name, type(name, (_Record,), {}))


def read_metadata(checkpoint: Path) -> Metadata:
    """Return the metadata of all tensors of a full checkpoint or a delta, for ``SafeReader``.

    A delta has only the changed rows of some tensors. The metadata of these tensors point to an
    earlier checkpoint; ``read_rows`` then reads the changed rows.

    Raises:
        DamagedError: as ``read_own_metadata``, or a checkpoint before a delta is missing.
    """
    if not (checkpoint / MANIFEST).exists():  # a folder that only DCP has written
        return read_own_metadata(checkpoint)
    base, *deltas = chain_of(checkpoint)
    found = _seen_from(read_own_metadata(base), base, checkpoint)
    for link in deltas:
        own, delta = _seen_from(read_own_metadata(link), link, checkpoint), read_delta(link)
        rows = set(() if delta is None else delta.rows)
        if missing := rows - found.state_dict_metadata.keys():
            raise DamagedError(f"{link}: the delta needs {min(missing)!r}, which {base} lacks")
        kept = {name: found.state_dict_metadata[name] for name in rows}
        places = {index: place for index, place in found.storage_data.items() if index.fqn in rows}
        found = Metadata(
            {**kept, **own.state_dict_metadata}, storage_data={**places, **own.storage_data}
        )
    return found


def _seen_from(metadata: Metadata, folder: Path, checkpoint: Path) -> Metadata:
    """Return the metadata of ``folder`` with file names relative to ``checkpoint``."""
    if folder == checkpoint:
        return metadata
    places = {
        index: replace(place, relative_path=f"../{folder.name}/{place.relative_path}")
        for index, place in metadata.storage_data.items()
    }
    return Metadata(metadata.state_dict_metadata, storage_data=places)


def read_own_metadata(checkpoint: Path) -> Metadata:
    """Read the pickled DCP file ``.metadata`` without running code from it.

    Raises:
        DamagedError: the file is damaged, or contains a class that checkpoints do not use.
    """
    path = checkpoint / METADATA
    try:
        return _metadata(_Records(path.read_bytes()).load().state)
    except _RefusedError as error:
        raise DamagedError(_refusal(path, f"class {error}")) from error
    except Exception as error:  # a damaged pickle can raise any of these
        raise DamagedError(
            f"{path}: the file is damaged ({type(error).__name__}: {error})"
        ) from error


def _metadata(fields: dict[str, Any]) -> Metadata:
    entries = {name: _entry(entry) for name, entry in fields["state_dict_metadata"].items()}
    places = {}
    for index, info in fields["storage_data"].items():
        key, place = index.state, info.state
        file = place["relative_path"]
        if "/" in file or file in ("", ".", ".."):
            raise ValueError(f"{key['fqn']} is stored in {file!r}, outside of the checkpoint")
        offset = key.get("offset")
        where = MetadataIndex(key["fqn"], offset and _size(offset), key.get("index"))
        places[where] = _StorageInfo(file, place["offset"], place["length"])
    return Metadata(entries, storage_data=places)


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = record.state
    dtype = fields["properties"].state[0]
    if dtype not in DTYPES:
        raise ValueError(f"{dtype!r} is not a dtype")
    chunks = [
        ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
        for chunk in fields["chunks"]
    ]
    properties = TensorProperties(dtype=getattr(torch, dtype))
    return TensorStorageMetadata(properties, _size(fields["size"]), chunks)


def _size(record: Any) -> torch.Size:
    return torch.Size(*record.args)


def as_named_now(metadata: Metadata, names: Callable[[], Iterable[str]]) -> Metadata:
    """Rename data-parallel tables of early checkpoints; ``names`` returns the model's names."""
    entries = metadata.state_dict_metadata
    new = {name: _COPIES.sub(r"\1bags\2", name) for name in entries}
    tables = [name for name in entries if name.startswith(_MODEL) and new[name] != name]
    if not tables:
        return metadata
    known = {f"{_MODEL}{name}" for name in names()}
    if any(name in known or new[name] not in known - entries.keys() for name in tables):
        return metadata  # the current model has tables of that name
    return Metadata(
        {new[name]: entry for name, entry in entries.items()},
        storage_data={
            replace(index, fqn=new[index.fqn]): place
            for index, place in metadata.storage_data.items()
        },
    )


class TellingWriter(FileSystemWriter):
    """DCP writer that raises the original OSError (disk full) instead of torch's RuntimeError."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


class SafeReader(FileSystemReader):
    """DCP reader of given metadata. DCP's own ``read_metadata`` would run pickled code."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        """Return the metadata passed to the constructor."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors; raise DamagedError for objects that ``weights_only=True`` would reject."""
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:
            what = "an object that torch.load(weights_only=True) rejects"
            raise DamagedError(_refusal(Path(self.path), what)) from error


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP load planner that requires equal names and dtypes and unpickles only plain values."""

    def __init__(self, trained: Collection[str] = (), *, partial: bool = False) -> None:
        self._trained = tuple(f"{_STATE}{name}." for name in trained)
        self._partial = partial
        # Not flattened: a table without rows on this rank would be missing from the flat state.
        # torch would treat that as a checkpoint from before 2.4 and fail without optimizer state.
        super().__init__(flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        """Refuse weights that the model lacks or has in another dtype; DCP would accept both."""
        assert self.metadata is not None, "set_up_planner came before"
        for name, stored in {} if self._partial else self.metadata.state_dict_metadata.items():
            if name.startswith(_MODEL) and name not in self.state_dict:
                raise ValueError(
                    f"the checkpoint has the parameter {name!r}, but the model does not"
                )
            dtype = getattr(self.state_dict.get(name), "dtype", None)
            if isinstance(stored, TensorStorageMetadata) and dtype not in (
                None,
                stored.properties.dtype,
            ):
                raise ValueError(
                    f"parameter {name!r} is {stored.properties.dtype} in the checkpoint, but "
                    f"{dtype} in the model"
                )
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse optimizer state that no rank's optimizer has; DCP would accept it."""
        read = {item.storage_index.fqn for plan in global_plan for item in plan.items}
        for name in self.metadata.state_dict_metadata if self.metadata else ():
            if name.startswith(self._trained) and name not in read:
                raise ValueError(
                    f"the checkpoint has the optimizer state {name!r}, but the optimizer does not"
                )
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a plain value without unpickling other objects; DCP would unpickle any object."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def read_weights(
    checkpoint: Path, wanted: Callable[[str], bool] = lambda _: True, model: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return a dict from name to unsharded tensor, for parameters and buffers of a checkpoint.

    Includes names for which ``wanted`` is True. ``model`` has the model's parameter names, to
    rename the tables of early checkpoints.
    """
    metadata = as_named_now(read_metadata(checkpoint), lambda: model)
    weights = {
        name.removeprefix(_MODEL): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        if name.startswith(_MODEL) and wanted(name.removeprefix(_MODEL))
    }
    reader, planner = SafeReader(checkpoint, metadata), SafeLoadPlanner(partial=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load({"model": weights}, storage_reader=reader, planner=planner, no_dist=True)
    read_rows(checkpoint, {f"{_MODEL}{name}": weight for name, weight in weights.items()})
    return weights


def table_weights(checkpoint: Path, table: str) -> Tensor:
    """Return the rows of an embedding table, ``[num_embeddings, embedding_dim]``.

    Raises:
        RecdError: the checkpoint is damaged or has no such table.
    """
    tables = {}
    for name in read_metadata(checkpoint).state_dict_metadata:
        parts = name.split(".")
        if parts[0] == "model" and parts[-3:-2] in (["embedding_bags"], ["embeddings"]):
            tables[parts[-2]] = name.removeprefix(_MODEL)
    if table not in tables:
        raise RecdError(
            f"{checkpoint}: the checkpoint has no table {table!r}"
            + (did_you_mean(table, tables) or f". Use one of: {shortened(list(tables))}.")
        )
    wanted = tables[table]
    check_whole(checkpoint)
    return read_weights(checkpoint, lambda name: name == wanted)[wanted]


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint into an unsharded model.

    Ignores the additional tensors that sharded modules store for their tables.
    """
    own = model.state_dict()
    kept = tuple(f"{module.path}." for module in embedding_modules(model) if module.path)
    weights = read_weights(checkpoint, lambda n: n in own or not n.startswith(kept), own)
    for name in own.keys() ^ weights.keys():
        raise RecdError(
            f"{checkpoint}: parameter {name!r} exists only in the "
            f"{'model of the registry file' if name in own else 'checkpoint'}. Use the registry "
            "file that trained the checkpoint."
        )
    model.load_state_dict(weights)


def _refusal(path: Path, name: str) -> str:
    return (
        f"{path}: the file contains {name}, which checkpoints must not contain. No code from the "
        "file was run. Do not use checkpoints from this source."
    )
