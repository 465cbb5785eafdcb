"""What ``.metadata`` of a checkpoint says, read without running anything that it names.

torch.distributed.checkpoint writes it as a pickle, and its own reader unpickles it, by which a file
can run any code. Here each class that DCP writes becomes an inert record, made anew for each file,
and anything else is refused; then the records are checked field by field.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recd_plugins.training.checkpoint_files.errors import DamagedError

METADATA = ".metadata"
Shape = tuple[int, ...]
#: Name of an entry, where its chunk begins (None: bytes), and its number among the chunks.
Key = tuple[str, Shape | None, int | None]

_DCP = "torch.distributed.checkpoint.metadata"
_PATHS = ("pathlib", "pathlib._local")
#: What torch 2.11 to 2.14 write, and Python 3.11 to 3.14 with them.
ALLOWED = {
    *(
        (_DCP, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "BytesStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in _PATHS for name in ("PosixPath", "WindowsPath")),
    ("builtins", "getattr"),  # members of enums, by Python 3.11.0 to 3.11.3: a record as the others
}
DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("uint8", "int8", "int16", "int32", "int64", "bool", "complex64", "complex128"),
    }
)


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: where it begins, and its size."""

    offsets: Shape
    sizes: Shape


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint; ``dtype`` is the name that torch has for it."""

    dtype: str
    size: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ByteRange:
    """Where a chunk or the bytes of an entry are: a file, and bytes of it."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds: its entries by name, None for bytes, and where they are."""

    entries: dict[str, Tensor | None]
    places: dict[Key, ByteRange]


def read_metadata(checkpoint: Path) -> Contents:
    """What ``.metadata`` of a checkpoint says.

    Raises:
        DamagedError: it holds a class that no checkpoint needs, which is named, or is damaged.
    """
    path = checkpoint / METADATA
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        return _contents(_Records(content).load())
    except _RefusedError as error:
        raise DamagedError(
            f"{path}: names {error}, which no checkpoint needs; nothing of it was run. Take no "
            "checkpoint from where this one is from"
        ) from error
    except Exception as error:  # a pickle can be damaged into any of them
        raise DamagedError(f"{path}: is damaged ({type(error).__name__}: {error})") from error


class _RefusedError(pickle.UnpicklingError):
    """The full name of a class that is not on the list."""


class _Record:
    """Stands for an object: what it was made with, and its state."""

    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> _Record:
        record = object.__new__(cls)
        record.args = args
        return record

    def __init__(self, *_: Any) -> None:
        """What it is made with, ``__new__`` keeps."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Records(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._classes: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) not in ALLOWED:
            raise _RefusedError(f"{module}.{name}")
        return self._classes.setdefault(name, type(name, (_Record,), {}))


def _contents(metadata: Any) -> Contents:
    fields = _fields(metadata, "Metadata")
    entries = {_text(name): _entry(entry) for name, entry in fields["state_dict_metadata"].items()}
    places = dict(_places(fields["storage_data"]))
    for (name, offset, _), place in places.items():
        tensor = entries[name]
        if (tensor is None) != (offset is None):
            raise ValueError(f"{name} is no tensor in one place, and one in another")
        if tensor is not None and len(offset or ()) != len(tensor.size):
            raise ValueError(f"{name} has {len(tensor.size)} dimensions, and a chunk others")
        if "/" in place.file or place.file in ("", ".", ".."):
            raise ValueError(f"{name} is in {place.file!r}, outside of the checkpoint")
    return Contents(entries, places)


def _entry(record: Any) -> Tensor | None:
    if type(record).__name__ == "BytesStorageMetadata":
        return None
    fields = _fields(record, "TensorStorageMetadata")
    properties = fields["properties"]
    _expect(properties, "TensorProperties")
    dtype = properties.state[0]
    if dtype not in DTYPES:
        raise ValueError(f"{dtype!r} is no dtype")
    chunks = tuple(_chunk(chunk) for chunk in fields["chunks"])
    return Tensor(dtype, _shape(fields["size"]), chunks)


def _chunk(record: Any) -> Chunk:
    fields = _fields(record, "ChunkStorageMetadata")
    return Chunk(_shape(fields["offsets"]), _shape(fields["sizes"]))


def _places(storage: Any) -> Iterator[tuple[Key, ByteRange]]:
    for index, info in storage.items():
        key = _fields(index, "MetadataIndex")
        where = _fields(info, "_StorageInfo")
        if where.get("transform_descriptors"):
            raise ValueError("its data is transformed, which this package never does")
        offset, number = key.get("offset"), key.get("index")
        yield (
            (
                _text(key["fqn"]),
                None if offset is None else _shape(offset),
                None if number is None else _count(number),
            ),
            ByteRange(
                _text(where["relative_path"]), _count(where["offset"]), _count(where["length"])
            ),
        )


def _fields(record: Any, kind: str) -> dict[str, Any]:
    _expect(record, kind)
    if not isinstance(record.state, dict):
        raise ValueError(f"a {kind} has no fields")
    return record.state


def _expect(record: Any, kind: str) -> None:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise ValueError(f"a {type(record).__name__} where a {kind} belongs")


def _shape(record: Any) -> Shape:
    _expect(record, "Size")
    ((sizes),) = record.args
    if not isinstance(sizes, tuple):
        raise ValueError("a size of no numbers")
    return tuple(_count(size) for size in sizes)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a number belongs")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} where a name belongs")
    return value
