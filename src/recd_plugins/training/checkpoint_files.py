"""Reads and writes checkpoint files: manifest, progress and arrays. Does not import torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter

from recd_plugins.runtime.errors import RecdError

MANIFEST, PROGRESS, IDENTITY = "manifest.json", "progress.json", "identity.json"
#: File written by torch.distributed.checkpoint.
METADATA = ".metadata"
#: Files with the fitted preprocessing and the state of each rank.
FITTED, RANKS = "preprocessing.npz", "ranks.npz"
#: Suffix of the files with changed rows.
ROWS = ".parquet"
#: Formats of full checkpoints and of deltas, which earlier versions refuse.
FORMAT, DELTA_FORMAT = 1, 2

_NAME = re.compile(r"step-\d{9}")
# Names left by a killed process: partly written, partly deleted, or about to be replaced.
_LEFTOVER = re.compile(r"\.(?P<step>step-\d{9})(\.[0-9a-f]{8})?\.(partial|old|(?P<whole>before))")
Number = Annotated[int, Field(ge=0, le=2**53)]

# Fields of a run's identity: sections of additional plugin kinds, and of kinds that only observe.
FURTHER, OBSERVERS = "further", "observers"
#: Fields that a resumed run may change, because they do not affect results.
FREE = (
    *(
        "sharding",
        "cache",
        "ingestion",
        "versions",
        "model.pool_rows",
        "model.user_rows",
        OBSERVERS,
    ),
    # Former options of datasets, in early checkpoints. The data is compared by its content.
    *(
        f"dataset.options.{name}"
        for name in ("bad_lines", "max_bad_lines", "npy_sparse", "read", "test.measure")
    ),
    *(
        f"training.{name}"
        for name in (
            *("ranks", "ranks_per_node", "topology", "workers", "epochs", "steps", "device"),
            *("overlap", "checkpoint", "evaluate", "validation", "hang_notice", "hang_timeout"),
            *("cuda_graphs", "progressive_validation"),
        )
    ),
)
#: Fields that it may change with ``--allow``: the state still fits, but later steps differ.
ALLOWABLE = (
    *("training.learning_rate", "training.dense_learning_rate", "training.eps"),
    *("training.schedule", "training.wire", "converter", "preprocessing", "model.bag_pooling"),
)


class DamagedError(RecdError):
    """A checkpoint file is missing, changed or unsafe."""


def damaged(problems: Sequence[str]) -> DamagedError:
    """Return a ``DamagedError`` whose message describes the first problem."""
    return DamagedError(
        f"{problems[0]}. Use another checkpoint, and check it with recd checkpoint verify."
    )


# The folder.


def step_name(step: int) -> str:
    """Return the name of the folder with the checkpoint of a step."""
    return f"step-{step:09d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first; empty if the folder is missing."""
    if not folder.exists():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir())


def clean(folder: Path) -> None:
    """Remove incomplete checkpoints of killed runs, and restore the names of complete ones."""
    for path in folder.iterdir():
        if not (found := _LEFTOVER.fullmatch(path.name)):
            continue
        checkpoint = path.with_name(found["step"])
        if found["whole"] and not checkpoint.exists():
            os.replace(path, checkpoint)
        else:
            shutil.rmtree(path, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint so that no run loads it, and return the new path."""
    number = 1
    while (aside := checkpoint.with_name(f"{checkpoint.name}.damaged-{number}")).exists():
        number += 1
    os.replace(checkpoint, aside)
    return aside


def delete(checkpoint: Path) -> None:
    """Rename a checkpoint, then delete its files."""
    os.replace(checkpoint, dying := hidden(checkpoint, "old"))
    shutil.rmtree(dying, ignore_errors=True)


def put(partial: Path, checkpoint: Path) -> None:
    """Rename a written checkpoint to its final name, replacing an existing one."""
    before = hidden(checkpoint, "before") if checkpoint.exists() else None
    if before:
        os.replace(checkpoint, before)
    try:
        os.replace(partial, checkpoint)
    except OSError:
        if before:
            os.replace(before, checkpoint)
        raise
    sync(checkpoint.parent)
    if before:
        dying = before.with_suffix(".old")
        os.replace(before, dying)
        shutil.rmtree(dying, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hidden(checkpoint: Path, suffix: str) -> Path:
    """Return a hidden, randomly named path next to a checkpoint."""
    return checkpoint.with_name(f".{checkpoint.name}.{secrets.token_hex(4)}.{suffix}")


# The manifest: size and digest of each file, and a digest of itself.


@dataclass(frozen=True)
class FileDigest:
    """The size of a file in bytes and its SHA-256 in hex."""

    bytes: int
    sha256: str


def digest_of(path: Path) -> FileDigest:
    """Read a file and return its size and SHA-256."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), sha256)


@dataclass(frozen=True)
class DeltaOf:
    """The part of a delta's manifest that links it to the checkpoint before it.

    Attributes:
        base: folder name of the checkpoint before it, which is full or a delta.
        sha256: SHA-256 of the manifest file of ``base``.
        rows: names of the tensors of which the delta has only changed rows. It has all other
            tensors whole.
    """

    base: str
    sha256: str
    rows: tuple[str, ...]


def manifest_text(files: Mapping[str, FileDigest], delta: DeltaOf | None = None) -> str:
    """Return the manifest as JSON; its last entry is a digest of the other entries."""
    entries = {name: asdict(digest) for name, digest in sorted(files.items())}
    if delta is None:
        return sealed({"format": FORMAT, "files": entries})
    return sealed({"format": DELTA_FORMAT, "delta": asdict(delta), "files": entries})


def sealed(document: dict[str, Any]) -> str:
    """Return a document as JSON text that includes a SHA-256 digest of the document."""
    text = json.dumps(document, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({**document, "sha256": digest}, indent=1) + "\n"


def read_manifest(checkpoint: Path) -> dict[str, FileDigest]:
    """Return a dict from file name to digest, for all files of a checkpoint."""
    document = _manifest(checkpoint)
    files = {name: FileDigest(**entry) for name, entry in document["files"].items()}
    if any("/" in name for name in files):
        raise DamagedError(
            f"{checkpoint / MANIFEST}: the manifest lists a file outside of the checkpoint"
        )
    return files


def read_delta(checkpoint: Path) -> DeltaOf | None:
    """Return the link of a delta to the checkpoint before it; None for a full checkpoint."""
    if (delta := _manifest(checkpoint).get("delta")) is None:
        return None
    if not _NAME.fullmatch(delta["base"]):
        raise DamagedError(f"{checkpoint / MANIFEST}: {delta['base']!r} is not a checkpoint")
    return DeltaOf(delta["base"], delta["sha256"], tuple(delta["rows"]))


def _manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    try:
        text = _regular(path).read_text(encoding="utf-8")
        document = json.loads(text)
        del document["sha256"]
        intact = sealed(document) == text
    except OSError as error:
        raise DamagedError(_unreadable(path, error)) from error
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise DamagedError(f"{path}: the file is damaged")
    if document.get("format") not in (FORMAT, DELTA_FORMAT):
        raise RecdError(
            f"{path}: the checkpoint has format {document.get('format')!r}, but this version reads "
            f"formats {FORMAT} and {DELTA_FORMAT}. Use the version of recd-plugins that wrote the "
            "checkpoint."
        )
    return document


def chain_of(checkpoint: Path) -> list[Path]:
    """Return the checkpoints that a checkpoint consists of: the full one, then its deltas in order.

    Raises:
        DamagedError: a manifest is damaged, or a checkpoint before a delta is missing or changed.
    """
    chain = [checkpoint]
    while (delta := read_delta(chain[0])) is not None:
        base = chain[0].with_name(delta.base)
        if not base.is_dir():
            raise DamagedError(f"{base}: the checkpoint is missing, but {chain[0].name} needs it")
        if digest_of(base / MANIFEST).sha256 != delta.sha256:
            raise DamagedError(
                f"{base / MANIFEST}: the file has changed since {chain[0].name} was written"
            )
        chain.insert(0, base)
    return chain


def row_files(chain: Sequence[Path]) -> list[tuple[Path, frozenset[str]]]:
    """Return the files with changed rows of a chain, with the names of the tensors to read.

    A tensor is not read from deltas before one that has the tensor whole.
    """
    found: list[tuple[Path, frozenset[str]]] = []
    names: frozenset[str] | None = None
    for link in reversed(chain):
        if (delta := read_delta(link)) is None:
            break
        names = frozenset(delta.rows) if names is None else names & frozenset(delta.rows)
        files = sorted(name for name in read_manifest(link) if name.endswith(ROWS))
        found[:0] = [(link / name, names) for name in files]
    return found


def misfits(checkpoint: Path, files: Mapping[str, FileDigest]) -> tuple[list[str], list[str]]:
    """Return (descriptions of missing or wrongly sized files, descriptions of unknown files)."""
    damage = []
    for name, digest in files.items():
        path = checkpoint / name
        try:
            size = _regular(path).stat().st_size
        except OSError as error:
            damage.append(_unreadable(path, error))
        else:
            if size != digest.bytes:
                damage.append(f"{path}: the file has {size} bytes instead of {digest.bytes}")
    names = sorted(path.name for path in checkpoint.iterdir())
    extra = [name for name in names if name not in {MANIFEST, *files}]
    return damage, [
        f"{checkpoint / name}: the file is not part of this checkpoint" for name in extra
    ]


def differing(checkpoint: Path, files: Mapping[str, FileDigest]) -> list[str]:
    """Return descriptions of files whose contents do not match their digests."""
    damage = []
    for name, digest in files.items():
        path = checkpoint / name
        try:
            if digest_of(path) != digest:
                damage.append(f"{path}: the content of the file has changed (SHA-256 differs)")
        except OSError as error:
            damage.append(_unreadable(path, error))
    return damage


def check_file(checkpoint: Path, name: str) -> bool:
    """Return True if the checkpoint has this file; raise ``DamagedError`` if it was changed."""
    files = read_manifest(checkpoint)
    if name not in files:
        return False
    mine = {name: files[name]}
    if damage := misfits(checkpoint, mine)[0] or differing(checkpoint, mine):
        raise damaged(damage)
    return True


def problems(checkpoint: Path) -> tuple[list[str], list[str]]:
    """Read all files; return (descriptions of damaged files, descriptions of unknown files)."""
    try:
        files = read_manifest(checkpoint)
    except DamagedError as error:
        return [str(error)], []
    damage, extra = misfits(checkpoint, files)
    return damage or differing(checkpoint, files), extra


def check_whole(checkpoint: Path) -> None:
    """Read all files of a checkpoint and of those before a delta; raise ``DamagedError``."""
    for each in chain_of(checkpoint):
        if damage := problems(each)[0]:
            raise damaged(damage)


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path}: the file is missing"
    return f"{path}: the file cannot be read ({error.strerror or error})"


def _regular(path: Path) -> Path:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("not a regular file")
    return path


# Progress.


@dataclass(frozen=True)
class ValidationCurve:
    """The validated steps of a run, with the values of the metric that selects the best one."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    metric: str
    mode: Literal["min", "max"]
    steps: list[Number] = field(default_factory=list)
    values: list[FiniteFloat | None] = field(default_factory=list)

    @property
    def best(self) -> int | None:
        """Return the index of the best validation, the first of equals; None without values."""
        sign = 1 if self.mode == "min" else -1
        known = [(sign * value, i) for i, value in enumerate(self.values) if value is not None]
        return min(known)[1] if known else None

    @property
    def best_step(self) -> int | None:
        """Return the step of the best validation."""
        return None if self.best is None else self.steps[self.best]

    @property
    def stale(self) -> int:
        """Return the number of validations since the best one."""
        return len(self.values) - (0 if self.best is None else self.best + 1)

    def with_value(self, step: int, value: float | None) -> ValidationCurve:
        """Return a copy of the curve with one more validated step."""
        return replace(self, steps=[*self.steps, step], values=[*self.values, value])


@dataclass(frozen=True)
class Progress:
    """Progress of a run, stored in checkpoints.

    Attributes:
        reader: the data reader's position after the last trained batch.
        losses: mean loss over ranks of each step; empty if losses were not recorded.
        callbacks: dict from callback key to its states, one per rank.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    step: Number = 0
    epoch: Number = 0
    reader: dict[str, Any] | None = None
    losses: list[FiniteFloat] = field(default_factory=list)
    callbacks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    validation: ValidationCurve | None = None

    @property
    def best_step(self) -> int | None:
        """Return the step of the best validation, or None without validation."""
        return None if self.validation is None else self.validation.best_step


def progress_text(progress: Progress) -> str:
    """Return the progress as the JSON text of ``progress.json``."""
    values = asdict(progress)
    for later in ("callbacks", "validation"):  # missing from files of the first versions
        if not values[later]:
            del values[later]
    text = json.dumps(values) + "\n"
    _parsed(text)  # fails now if loading would refuse the progress
    return text


def read_progress(checkpoint: Path) -> Progress:
    """Read the file ``progress.json`` of a checkpoint."""
    path = checkpoint / PROGRESS
    try:
        progress = _parsed(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedError(
            f"{path}: the file is invalid ({shorten(str(error), 200)}). Use another checkpoint."
        ) from error
    if checkpoint.name != step_name(progress.step):
        raise DamagedError(
            f"{path}: the file has step {progress.step}, but its folder is {checkpoint.name!r}. "
            f"Rename the folder to {step_name(progress.step)}."
        )
    return progress


def _parsed(text: str | bytes) -> Progress:
    progress = TypeAdapter(Progress).validate_json(text)
    if progress.losses and len(progress.losses) != progress.step:
        raise ValueError(f"losses has {len(progress.losses)} values, but step is {progress.step}")
    return progress


# Arrays: npz archives without pickle.


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> FileDigest:
    """Write named arrays to a file and return its digest for the manifest."""
    with zipfile.ZipFile(path, "w") as archive:
        for number, (name, array) in enumerate(arrays.items()):
            entry = zipfile.ZipInfo(f"{number}.npy")
            entry.comment = name.encode()  # may be any string, unlike a file name
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array, order="C"), allow_pickle=False)
    return digest_of(path)


def read_arrays(checkpoint: Path, name: str) -> dict[str, np.ndarray]:
    """Return a dict from name to array of a checkpoint file; empty if the file does not exist."""
    if not check_file(checkpoint, name):
        return {}
    arrays = {}
    with zipfile.ZipFile(checkpoint / name) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
            arrays[entry.comment.decode()] = array
    return arrays
