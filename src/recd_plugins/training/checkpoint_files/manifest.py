"""The manifest of a checkpoint: size and digest of each of its files, and a digest of itself."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recd_plugins.errors import RecdError
from recd_plugins.training.checkpoint_files.errors import DamagedError, damaged

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class FileDigest:
    """What a file has to be: its size in bytes and its SHA-256 in hex."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if type(self.bytes) is not int or type(self.sha256) is not str:
            raise TypeError(f"{self.bytes!r} and {self.sha256!r} are no size and digest")


def digest_of(path: Path) -> FileDigest:
    """Size and digest of a file, which is read whole."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), sha256)


def manifest_text(files: Mapping[str, FileDigest]) -> str:
    """The manifest of these files: JSON, whose last entry is the digest of all before it."""
    entries = {name: asdict(digest) for name, digest in sorted(files.items())}
    return _sealed({"format": FORMAT, "files": entries})


def read_manifest(checkpoint: Path) -> dict[str, FileDigest]:
    """The files that a checkpoint has to have.

    Raises:
        DamagedError: there is no manifest, or it is not as it was written.
        RecdError: a later version wrote it.
    """
    path = checkpoint / MANIFEST
    try:
        text = _regular(path).read_text(encoding="utf-8")
        document = json.loads(text)
        del document["sha256"]
        intact = _sealed(document) == text
    except FileNotFoundError:
        raise DamagedError(f"{path}: is missing") from None
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise DamagedError(f"{path}: is damaged")
    if document.get("format") != FORMAT:
        raise RecdError(
            f"{path}: is of format {document.get('format')!r}, and this version reads {FORMAT}; "
            "take the version of recd-plugins that wrote it"
        )
    try:
        return {_plain(name): FileDigest(**entry) for name, entry in document["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{path}: is no manifest ({error})") from error


def misfits(checkpoint: Path, files: Mapping[str, FileDigest]) -> tuple[list[str], list[str]]:
    """What is missing or of another size, and what is there besides; digests are not looked at."""
    damage = []
    for name, digest in files.items():
        try:
            size = _regular(checkpoint / name).stat().st_size
        except FileNotFoundError:
            damage.append(f"{checkpoint / name}: is missing")
        except OSError as error:
            damage.append(f"{checkpoint / name}: cannot be read ({error.strerror or error})")
        else:
            if size != digest.bytes:
                damage.append(f"{checkpoint / name}: has {size} bytes, and had {digest.bytes}")
    known = {MANIFEST, *files}
    return damage, [
        f"{path}: is no file of this checkpoint"
        for path in sorted(checkpoint.iterdir())
        if path.name not in known
    ]


def differing(checkpoint: Path, files: Mapping[str, FileDigest]) -> list[str]:
    """Which of these files, all of the right size, have another content."""
    damage = []
    for name, digest in files.items():
        try:
            found = digest_of(checkpoint / name)
        except OSError as error:
            damage.append(f"{checkpoint / name}: cannot be read ({error.strerror or error})")
        else:
            if found != digest:
                damage.append(
                    f"{checkpoint / name}: its content is not what was written (SHA-256 "
                    f"{found.sha256[:12]}..., and was {digest.sha256[:12]}...)"
                )
    return damage


def check_file(checkpoint: Path, name: str) -> bool:
    """Refuse a file that is not as it was written; says whether the checkpoint has it.

    Raises:
        DamagedError: it is not, or the manifest.
        RecdError: as ``read_manifest``.
    """
    files = read_manifest(checkpoint)
    if name not in files:
        return False
    mine = {name: files[name]}
    if damage := misfits(checkpoint, mine)[0] or differing(checkpoint, mine):
        raise damaged(damage)
    return True


def problems(checkpoint: Path) -> tuple[list[str], list[str]]:
    """Everything wrong with a checkpoint, every file read: the damage, and what is there besides.

    Raises:
        RecdError: a later version wrote it.
    """
    try:
        files = read_manifest(checkpoint)
    except DamagedError as error:
        return [str(error)], []
    damage, extra = misfits(checkpoint, files)
    return damage or differing(checkpoint, files), extra


def _plain(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no name of a file here")
    return name


def _sealed(document: dict[str, Any]) -> str:
    digest = hashlib.sha256(_text(document).encode()).hexdigest()
    return _text({**document, "sha256": digest})


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def _regular(path: Path) -> Path:
    """The path of a file; a link could lead out of the checkpoint, and a pipe nowhere."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("no plain file")
    return path
