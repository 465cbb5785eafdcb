"""Serves a model with changes that a run publishes while training continues.

Needs only torch, pyarrow and numpy. The published folder contains:

* ``program-N``: the exported programs without weights, and ``program.json``, which maps the names
  of weights in training to names in the programs.
* ``base-N`` and ``delta-N``: all rows, or the rows that changed since version N - 1. Each file
  ``manifest.json`` has the digests of its files. A delta's manifest also has the digest of version
  N - 1.
* ``current.json``: the program, the newest base and the deltas, with digests. It is replaced last.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recd_plugins.runtime.errors import DataError
from recd_plugins.runtime.files import read_note

__all__ = ["LiveModel", "LiveVersion"]

logger = logging.getLogger(__name__)

_FREE = -1  # id of a row that no id has


class LiveModel:
    """An exported model that applies published deltas between requests.

    Threads may call the model, ``version`` and ``update`` at the same time. A request sees the
    weights and ids of one version only. Nothing is written to disk.

    Args:
        folder: folder to which a run publishes.
        programs: files to load, by default all: ``model.pt2``, and if the model has user features
            ``user.pt2`` and ``candidates.pt2``.

    Attributes:
        problem: why the last update in the background failed; "" if it did not.

    Raises:
        DataError: the folder has no complete version.
    """

    def __init__(self, folder: Path | str, programs: Collection[str] | None = None) -> None:
        self.folder = Path(folder)
        self.problem = ""
        self._programs = programs
        self._lock = _SharedLock()
        self._updating = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        current = self._current()
        self._version = self._load(current)
        self._apply_deltas(current)

    def __call__(self, *inputs: Any) -> Tensor:
        """Return the result of ``model.pt2``."""
        with self.version() as version:
            return version.programs["model.pt2"](*inputs)

    @contextmanager
    def version(self) -> Iterator[LiveVersion]:
        """Yield the current version, which does not change in this context."""
        with self._lock.shared():
            yield self._version

    @property
    def freshness(self) -> float:
        """Return the seconds since the last training step of the current version."""
        return time.time() - self._version.time

    def update(self) -> int:
        """Apply new deltas, and return their number.

        After a new run, or if a delta is missing or damaged and a newer base exists, the newest
        base is loaded. Known deltas are ignored.

        Raises:
            DataError: a version is missing, damaged or out of order. The model continues to serve
                the last version that was complete.
        """
        with self._updating:
            while True:
                current = self._current()
                try:
                    return self._update(current)
                except DataError:
                    # The run may have removed files of this version after writing a newer one.
                    if self._current() == current:
                        raise

    def _update(self, current: Mapping[str, Any]) -> int:
        served = self._version
        newest = max(one["sequence"] for one in (current["base"], *current["deltas"]))
        if current["program"]["sha256"] == served.program_digest:
            if newest < served.sequence:
                raise DataError(
                    f"{self.folder}: current.json lists version {newest}, but version "
                    f"{served.sequence} is already served. Restore the newer current.json, or "
                    "restart the server to go back."
                )
            try:
                return self._apply_deltas(current)
            except DataError:
                if current["base"]["sequence"] <= self._version.sequence:
                    raise
        before, loaded = served.sequence, self._load(current)
        with self._lock.exclusive():
            self._version = loaded
        self._apply_deltas(current)
        return max(1, newest - before)

    def follow(self, seconds: float = 1.0) -> None:
        """Call ``update`` every ``seconds`` in a background thread, until ``close``."""

        def run() -> None:
            while not self._closed.wait(seconds):
                try:
                    self.update()
                    self.problem = ""
                except Exception as error:  # the thread must not end
                    if str(error) != self.problem:
                        logger.warning("%s", error)
                    self.problem = str(error) or type(error).__name__

        self._thread = threading.Thread(target=run, name="follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the background thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _current(self) -> dict[str, Any]:
        path = self.folder / "current.json"
        current: dict[str, Any] | None = read_note(path)
        if current is None:
            problem = "is damaged" if path.exists() else "does not exist"
            raise DataError(
                f"{path}: the file {problem}. Publish the model with a callback of recd run."
            )
        return current

    def _load(self, current: Mapping[str, Any]) -> LiveVersion:
        program = current["program"]
        loaded = LiveVersion(self.folder / program["folder"], program["sha256"], self._programs)
        manifest = _manifest(self.folder, current["base"])
        self._apply(loaded, manifest, current["base"], nullcontext())  # no request sees it yet
        loaded.digest = manifest["delta"] or loaded.digest
        return loaded

    def _apply_deltas(self, current: Mapping[str, Any]) -> int:
        """Apply the deltas after the served version, in order. Return their number."""
        count, version = 0, self._version
        known = {one["sequence"]: one["sha256"] for one in current["deltas"]}
        if known.get(version.sequence, version.digest) != version.digest:
            raise DataError(
                f"{self.folder}: version {version.sequence} was replaced after it was served. Do "
                "not let two runs publish into one folder."
            )
        for one in current["deltas"]:
            if one["sequence"] <= version.sequence:
                continue
            where = f"{self.folder / one['folder']}"
            if one["sequence"] != version.sequence + 1:
                raise DataError(
                    f"{where}: the delta follows version {one['sequence'] - 1}, but version "
                    f"{version.sequence} is served. Wait for the next base."
                )
            manifest = _manifest(self.folder, one)
            if manifest["previous"] != version.digest:
                raise DataError(
                    f"{where}: the delta does not continue the served version "
                    f"{version.sequence}. Wait for the next base."
                )
            self._apply(version, manifest, one, self._lock.exclusive())
            count += 1
        return count

    def _apply(
        self,
        version: LiveVersion,
        manifest: Mapping[str, Any],
        entry: Mapping[str, Any],
        lock: AbstractContextManager[None],
    ) -> None:
        """Write a base or delta into a version, after all of its files are read and checked."""
        changes = version.read(self.folder / entry["folder"], manifest)
        with lock, torch.no_grad():
            for change in changes:
                change()
            version.sequence, version.digest = entry["sequence"], entry["sha256"]
            version.step, version.time = manifest["step"], manifest["time"]


class LiveVersion:
    """The programs of a model, whose weights change with each version.

    Attributes:
        folder: folder of the programs, ``signature.json`` and ``encode.py``.
        programs: exported modules by file name, such as ``model.pt2``.
        sequence: number of the version.
        step: number of training steps.
        time: Unix time of the last training step, in seconds.
    """

    def __init__(self, folder: Path, digest: str, programs: Collection[str] | None) -> None:
        self.folder = folder
        self.program_digest = digest
        self.digest = ""
        self.sequence = self.step = 0
        self.time = 0.0
        layout = json.loads(_checked(folder / "program.json", digest))
        self._tables: dict[str, Any] = layout["tables"]
        self._dense: dict[str, str] = layout["dense"]
        names = [name for name in layout["files"] if name.endswith(".pt2")]
        self.programs: dict[str, nn.Module] = {}
        for name in names if programs is None else programs:
            content = io.BytesIO(_checked(folder / name, layout["files"][name]))
            self.programs[name] = torch.export.load(content).module()
        none = np.empty(0, np.int64)
        self._ids = {name: _SortedIds(none, none) for name in self._tables}
        self._allocate()

    def read(self, folder: Path, manifest: Mapping[str, Any]) -> list[Callable[[], object]]:
        """Read and check a base or delta. Return functions that write it into ``programs``."""
        changes: list[Callable[[], object]] = []
        for table, files in manifest["tables"].items():
            parts = [_checked(folder / one["file"], one["sha256"]) for one in files]
            rows = [pq.read_table(pa.BufferReader(part), use_threads=False) for part in parts]
            for one, part in zip(files, rows, strict=True):
                changes.append(self._row_change(table, part, one["column"]))
            if (index := self._tables[table]["index"]) is not None:
                merged = self._ids[table].merged([part for part in rows if len(part)])
                changes.append(partial(self._ids.__setitem__, table, merged))
                ids, of_ids = merged.padded(index["size"])
                changes.append(partial(self._put, index["ids"], ids))
                changes.append(partial(self._put, index["rows"], of_ids))
        path = folder / "dense.npz"
        with np.load(io.BytesIO(_checked(path, manifest["dense"])), allow_pickle=False) as dense:
            for name in dense.files:
                program = self._dense.get(name) or self._tables[name]["weights"]
                weight, values = self._weights.get(program), torch.from_numpy(dense[name])
                if weight is not None:  # None: of a program that is not loaded
                    changes.append(partial(weight.copy_, values))
        return changes

    def _row_change(self, table: str, part: pa.Table, column: int) -> Callable[[], object]:
        weight = self._weights.get(self._tables[table]["weights"])
        if weight is None:
            return lambda: None
        lists = part.column("weights").combine_chunks()
        width = lists.type.list_size
        values = torch.from_numpy(_array(lists.flatten())).view(len(part), width)
        rows = torch.from_numpy(_array(part.column("row")))
        into = weight[:, column : column + width]
        return lambda: into.index_copy_(0, rows, values.to(into.dtype))

    def _allocate(self) -> None:
        """Allocate the weights of the programs. Exported weights are expanded zeros."""
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._weights: dict[str, Tensor] = {}
        for program in self.programs.values():
            for prefix, module in program.named_modules():
                for leaf in (*module._parameters, *module._buffers):
                    name = f"{prefix}.{leaf}".removeprefix(".").removeprefix("part.")
                    self._places.setdefault(name, []).append((module, leaf))
        names = [*self._dense.values(), *(table["weights"] for table in self._tables.values())]
        for name in names:
            if places := self._places.get(name):
                first = getattr(*places[0])
                # Programs share the weights.
                self._weights[name] = torch.zeros(first.shape, dtype=first.dtype)
                self._put(name, self._weights[name])

    def _put(self, name: str, tensor: Tensor) -> None:
        for module, leaf in self._places.get(name, ()):
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
            else:
                module._buffers[leaf] = tensor


class _SortedIds:
    """The ids of a dynamic table in ascending order, and their rows."""

    def __init__(self, ids: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        self.ids, self.rows = ids, rows

    def merged(self, parts: list[pa.Table]) -> _SortedIds:
        """Return a copy without the removed ids of a delta, and with its new ids."""
        if not parts:
            return self
        removed, ids, rows = (
            np.concatenate([_array(part.column(name)) for part in parts])
            for name in ("removed", "id", "row")
        )
        leaving = np.searchsorted(self.ids, removed[removed != _FREE])
        own, of_own = np.delete(self.ids, leaving), np.delete(self.rows, leaving)
        at = np.searchsorted(own, ids)
        new = ids != _FREE
        if len(own):
            new &= own[np.minimum(at, len(own) - 1)] != ids
        order = np.argsort(ids[new])
        at, ids, rows = (each[new][order] for each in (at, ids, rows))
        return _SortedIds(np.insert(own, at, ids), np.insert(of_own, at, rows))

    def padded(self, size: int) -> tuple[Tensor, Tensor]:
        """Return ids and rows, int64 ``[size]``, with free entries at the beginning."""
        free = size - len(self.ids)
        return tuple(  # type: ignore[return-value]
            torch.from_numpy(np.concatenate([np.full(free, value), each]))
            for value, each in ((_FREE, self.ids), (0, self.rows))
        )


class _SharedLock:
    """A readers-writer lock: requests share it, an update has it alone. Updates have priority."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests = 0
        self._waiting = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._requests += 1
        try:
            yield
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._waiting = True
            try:
                self._changed.wait_for(lambda: not self._requests)
                yield
            finally:
                self._waiting = False
                self._changed.notify_all()


def _manifest(folder: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / entry["folder"] / "manifest.json"
    return json.loads(_checked(path, entry["sha256"]))


def _checked(path: Path, digest: str) -> bytes:
    """Return the content of a file. Raises DataError if the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: the file cannot be read ({error.strerror or error}). Wait for the next base."
        ) from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise DataError(f"{path}: the file is damaged. Copy it again, or wait for the next base.")
    return content


def _array(column: Any) -> NDArray[Any]:
    """Return a column without nulls as a writable array."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return np.require(column.to_numpy(zero_copy_only=False), requirements="W")
