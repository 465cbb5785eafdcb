"""Where the shards of a log are."""

from __future__ import annotations

import re
from pathlib import Path

from recd_plugin_recd.logs.shard_format import ShardHeader, read_header
from recd_plugins.api import DataError

_NAME = re.compile(r"shard-(\d+)-of-(\d+)\.recdlog")


def shard_name(number: int, num_shards: int) -> str:
    """The name of a shard's file."""
    return f"shard-{number:05d}-of-{num_shards:05d}.recdlog"


def check_place(path: Path, header: ShardHeader) -> None:
    """Refuse a shard under the name of another one; other names are the user's own.

    Raises:
        DataError: says which shard it is.
    """
    if _NAME.fullmatch(path.name) and path.name != shard_name(header.shard, header.num_shards):
        raise DataError(
            f"{path}: by its header this is {shard_name(header.shard, header.num_shards)}; another "
            "shard was put in the place of this one"
        )


def shard_files(path: Path) -> list[Path]:
    """The shards of a log in order, or the one that ``path`` is.

    Raises:
        DataError: there are none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder")
    found = sorted(path.glob("shard-*.recdlog"))
    if not found:
        raise DataError(f"{path}: no log: there is no shard-*.recdlog in this folder")
    return found


def log_header(folder: Path) -> ShardHeader | None:
    """What a log was begun with; None where there is no log, or no header of it is whole.

    Raises:
        DataError: a shard cannot be read.
    """
    for path in sorted(folder.glob("shard-*.recdlog")):
        try:
            with path.open("rb") as file:
                found = read_header(file)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        if found is not None:
            return found.header
    return None
