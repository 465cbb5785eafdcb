"""The folder of a backing store in files: whose it is, what its files should be, and whole."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from recd_plugin_scars.runtime.spec import TEMPORARY
from recd_plugins.api import DataError, SetupError
from recd_plugins.api.files import write_json

MANIFEST = "manifest.json"
WEIGHTS = "weights"
STATE = "state"
_FORMAT = 1
# The name of a file that has not its full size yet ends so.
_NEW = ".new"
_ANEW = "remove the folder to make the table anew (a checkpoint fills it), or give another folder"


@dataclass(frozen=True)
class StoreShape:
    """What the files of a backing store hold, as its manifest says it."""

    name: str
    num_rows: int
    dim: int
    optimizer_state: bool
    shards: list[str] = field(default_factory=list)
    dtype: str = "float32"

    @property
    def file_bytes(self) -> dict[str, int]:
        """Length of each file, by its name."""
        lengths = {WEIGHTS: 4 * self.num_rows * self.dim}
        if self.optimizer_state:
            lengths[STATE] = 4 * self.num_rows
        return lengths


class StoreFolder:
    """Files of one backing store, in a folder of their own, which is locked until ``release``.

    Args:
        parent: folder of all stores of a run.
        shape: what the files shall hold.
        keep: whether a later run may go on with them.

    Attributes:
        path: the folder.
        is_kept: the files are an earlier run's; otherwise they are new and zero.
        is_scratch: no later run goes on with them, as things are.

    Raises:
        SetupError: another kernel uses the folder, it holds a table that this run is not to touch,
            or there is not enough room.
        DataError: what an earlier run kept is not whole, or of another shape.
    """

    def __init__(self, parent: Path, shape: StoreShape, *, keep: bool) -> None:
        self.path = parent / _folder_name(shape.name)
        self._shape, self._keep = shape, keep
        self._made_parent = not parent.exists()
        self._lock = _lock(self.path)
        self._is_marked = False
        try:
            self.is_kept = self._has_kept_files()
            self.is_scratch = not self.is_kept
            if not self.is_kept:
                self._make_files()
        except BaseException:
            self.release()
            raise

    def change(self) -> None:
        """Mark that rows change, before they do: a start that changes none leaves a table whole.

        Raises:
            RecdError: the manifest cannot be written.
        """
        if self._keep and not self._is_marked:
            self.is_scratch = False
            self._mark("in use")
            self._is_marked = True

    def complete(self) -> None:
        """Mark that the files, which are on disk, hold all rows.

        Raises:
            RecdError: the manifest cannot be written.
        """
        self.is_scratch = False
        self._mark("complete")

    def remove_files(self) -> None:
        """Take the files away; what is mapped from them stays as it is."""
        for name in (MANIFEST, f".{MANIFEST}.*", WEIGHTS, STATE, f"*{_NEW}"):
            for path in self.path.glob(name):
                path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let others use the folder; it goes if nothing is in it."""
        with suppress(OSError):
            self.path.rmdir()
            if self._made_parent or self.path.parent.name == TEMPORARY:
                self.path.parent.rmdir()
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)

    def _has_kept_files(self) -> bool:
        """Whether a table is there to go on with; what is of no use to anybody is removed."""
        manifest = _read_manifest(self.path / MANIFEST)
        if manifest is None:
            for name in self._shape.file_bytes:
                if (self.path / name).exists():
                    raise DataError(
                        f"{self.path / name} is there without {MANIFEST}, which says what it "
                        f"holds: {_ANEW}"
                    )
        if manifest is None or not manifest["keep"]:
            # Scratch files, or new ones that nobody trained. The run that made them is gone, or the
            # folder would be locked.
            self.remove_files()
            return False
        if not self._keep:
            raise SetupError(
                f"{self.path}: holds a table that an earlier run kept: set keep to go on with its "
                "rows, or give another folder"
            )
        if manifest["status"] != "complete":
            raise DataError(
                f"{self.path / MANIFEST}: status is {manifest['status']!r} and not 'complete': "
                f"process {manifest['process']} on {manifest['host']} ended without closing the "
                f"table, whose rows may be of different steps; {_ANEW}"
            )
        self._check_files(manifest)
        return True

    def _check_files(self, manifest: dict[str, Any]) -> None:
        for key, expected in asdict(self._shape).items():
            if manifest.get(key) != expected:
                raise DataError(
                    f"{self.path / MANIFEST}: {key} is {manifest.get(key)!r} in the table that "
                    f"an earlier run kept, and {expected!r} in this run's: {_ANEW}"
                )
        for name, expected in self._shape.file_bytes.items():
            file = self.path / name
            if not file.is_file():
                raise DataError(
                    f"{file}: is missing; a file of {expected:,} bytes should be there: {_ANEW}"
                )
            found = file.stat().st_size
            if found != expected:
                raise DataError(
                    f"{file}: has {found:,} bytes and should have {expected:,}: {_ANEW}"
                )

    def _make_files(self) -> None:
        """Files of zeros that have all their room on the disk."""
        needed = sum(self._shape.file_bytes.values())
        free = shutil.disk_usage(self.path).free
        try:
            if needed > free:
                raise OSError("the disk is full")
            for name, length in self._shape.file_bytes.items():
                with (self.path / (name + _NEW)).open("wb") as file:
                    if length:
                        os.posix_fallocate(file.fileno(), 0, length)
            # With a manifest, what a crash leaves from here on is known for what it is.
            self._mark("in use")
            for name in self._shape.file_bytes:
                os.replace(self.path / (name + _NEW), self.path / name)
        except OSError as error:
            self.remove_files()
            missing = f"; {needed - free:,} bytes are missing" if needed > free else ""
            raise SetupError(
                f"{self.path}: no room for {self._shape.num_rows:,} rows "
                f"({error.strerror or error}): {needed:,} bytes are needed, {free:,} are free"
                f"{missing}"
            ) from error
        except BaseException:
            self.remove_files()
            raise

    def _mark(self, status: Literal["in use", "complete"]) -> None:
        """Write the manifest, on the disk itself: it has to be there before rows change."""
        write_json(
            self.path / MANIFEST,
            {
                "format": _FORMAT,
                **asdict(self._shape),
                "keep": not self.is_scratch,
                "status": status,
                "process": os.getpid(),
                "host": socket.gethostname(),
            },
        )
        for path in (self.path / MANIFEST, self.path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def kept_stores(parent: Path) -> dict[Path, list[str]]:
    """The tables that earlier runs kept in a folder of stores, by the folder of each store.

    Raises:
        DataError: a manifest is none of this format.
    """
    found = {}
    for path in sorted(parent.glob(f"*.store/{MANIFEST}")):
        manifest = _read_manifest(path)
        if manifest is not None and manifest["keep"]:
            found[path.parent] = tables_of_shards(manifest.get("shards", []))
    return found


def tables_of_shards(shards: Iterable[str]) -> list[str]:
    """The tables of a store's shards, which are in words."""
    return [shard.rpartition(", rows ")[0] for shard in shards]


def _folder_name(name: str) -> str:
    """A name that any file system takes, and no two stores share."""
    quoted = quote(name, safe="")
    if len(quoted) > 200:
        quoted = f"{quoted[:160]}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return f"{quoted}.store"


def _lock(folder: Path) -> int:
    """A descriptor of the folder, made if it is not there, that locks it.

    Raises:
        SetupError: it is in use, or no folder can be there.
    """
    try:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                if _is_locked_here(descriptor, folder):
                    return descriptor
    except OSError as error:
        raise SetupError(
            f"{folder}: cannot hold a table ({error.strerror or error}); give a folder on a local "
            "disk that can be written"
        ) from error


def _is_locked_here(descriptor: int, folder: Path) -> bool:
    """Lock the folder; whether it is still the one that has its name, which another may remove."""
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Of a model of this process that nobody uses, but that is not collected yet?
            gc.collect()
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            return True
    except BlockingIOError as error:
        os.close(descriptor)
        manifest = _read_manifest(folder / MANIFEST) or {}
        # Until rows change, a kept one names the process that kept it.
        user = "which has changed no row yet"
        if manifest.get("status") == "in use":
            user = f"of process {manifest['process']} on {manifest['host']}"
        raise SetupError(
            f"{folder}: is in use by another table ({user}): end that run, or give another folder"
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return False


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """What the manifest says; None if there is none.

    Raises:
        DataError: it is none of this format.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            raise ValueError(f"format is {manifest['format']!r} and should be {_FORMAT}")
        for key in ("keep", "status", "process", "host"):
            manifest[key]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: is not the manifest of a table ({error!r}): {_ANEW}") from error
    return manifest
