"""What the writer of a log has promised to be there: each shard's bytes, records and digest.

Shards are appended to, so a shard may hold more than the manifest says: blocks of a writer that is
at work or was killed. It never holds less, or something else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from recd_plugin_recd.logs.shard_format import BlockHeader
from recd_plugins.api import DataError
from recd_plugins.api.files import json_text, new_file

MANIFEST = "manifest.json"
_VERSION = 1


@dataclass(frozen=True)
class Promise:
    """What is there of a shard, at least.

    Attributes:
        log: its ``sync`` in hex, which tells it from every other shard.
        bytes: from the start of the file to the end of a block.
        records: the number of the record that follows.
        digest: of the headers of the blocks up to there, each of which has its block's checksum.
    """

    log: str
    bytes: int
    records: int
    digest: str


Promises = Mapping[str, Promise]


def first_digest(sync: bytes) -> str:
    """The digest of a shard without blocks."""
    return hashlib.sha256(sync).hexdigest()


def next_digest(digest: str, header: BlockHeader, sync: bytes) -> str:
    """The digest after one more block."""
    return hashlib.sha256(bytes.fromhex(digest) + header.to_bytes(sync)).hexdigest()


def write_manifest(folder: Path, shards: Promises) -> None:
    """Write the manifest of a log, whole or not at all, on the disk to stay.

    Raises:
        RecdError: it cannot be written.
    """
    text = json_text(
        {"version": _VERSION, "shards": {name: asdict(shard) for name, shard in shards.items()}}
    )
    with new_file(folder / MANIFEST) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Promises | None:
    """What a log's manifest promises by name of the shard; None where there is no manifest.

    Raises:
        DataError: it cannot be read, or is none.
    """
    path = folder / MANIFEST
    try:
        said = json.loads(path.read_bytes())
        if said["version"] != _VERSION:
            raise ValueError(f"its version is {said['version']!r}, not {_VERSION}")
        shards = {str(name): Promise(**shard) for name, shard in said["shards"].items()}
        for name, shard in shards.items():
            bytes.fromhex(shard.digest + shard.log)
            if type(shard.bytes) is not int or type(shard.records) is not int:
                raise ValueError(f"{name} has no counts")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: no manifest of a log: {error}; remove it, and the next recd logs write "
            "--append makes one of the shards as they are then"
        ) from error
    return shards
