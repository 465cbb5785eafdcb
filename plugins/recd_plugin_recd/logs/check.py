"""Which shards of a log can be read, and what of the log is not as its writer left it."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from recd_plugin_recd.logs.damage import Damage, Report
from recd_plugin_recd.logs.manifest import MANIFEST, Promise, Promises, read_manifest
from recd_plugin_recd.logs.shard_files import shard_files, shard_name
from recd_plugin_recd.logs.shard_reader import ShardReader
from recd_plugins.api import DataError

logger = logging.getLogger(__name__)


def readable_shards(source: Path, report: Report) -> list[Path]:
    """The shards of a log, or the one that ``source`` is, that belong to it.

    Reads the headers of their blocks. Reported are shards that are missing, or stand in the place
    of another, or end before the manifest says, or are none of the log's. Blocks are not checked.

    Raises:
        DataError: there is no log.
    """
    paths = shard_files(source)
    folder = source if source.is_dir() else source.parent
    promises: Promises | None = {}
    try:
        promises = read_manifest(folder)
    except DataError as error:
        report(Damage(folder / MANIFEST, None, _without(folder / MANIFEST, error), 0, None))
        promises = None
    else:
        if promises is None:
            logger.warning(
                "%s: the log has no %s, as it was written by an earlier version: shards that end "
                "too early are not noticed; recd logs write --append adds one",
                source,
                MANIFEST,
            )
    found: list[Path] = []
    kinds: list[tuple[Path, tuple[str, str, str]]] = []
    num_shards = 0
    for path in paths:
        try:
            with ShardReader(path, lambda _damage: None) as reader:
                num_shards = max(num_shards, reader.header.num_shards)
                if promises is not None and _is_other(reader, promises.get(path.name), report):
                    continue
                header = reader.header
        except DataError as error:
            # The others may be whole.
            lost = promises[path.name].records if promises and path.name in promises else None
            report(Damage(path, 0, _without(path, error), lost, None))
            continue
        kinds.append((path, (header.record, header.key, header.session)))
    if kinds:
        usual, _ = Counter(kind for _, kind in kinds).most_common(1)[0]
        for path, kind in kinds:
            if kind == usual:
                found.append(path)
                continue
            lost = promises[path.name].records if promises and path.name in promises else None
            cause = f"its header says {', '.join(kind)}, and the others' {', '.join(usual)}"
            report(Damage(path, 0, cause, lost, None))
    if source.is_dir():
        names = {shard_name(number, num_shards) for number in range(num_shards)}
        for name in sorted(names.union(promises or ()) - {path.name for path in paths}):
            lost = promises[name].records if promises and name in promises else None
            report(Damage(folder / name, None, "the shard is missing", lost, None))
    return found


def _is_other(reader: ShardReader, promise: Promise | None, report: Report) -> bool:
    """Report what is wrong with a shard as a whole; whether it is none of this log's."""
    path = reader.path
    if promise is None:
        report(Damage(path, None, f"{MANIFEST} knows no such shard; it is left out", 0, None))
        return True
    if promise.log != reader.header.sync.hex():
        cause = f"another log's shard stands in its place ({MANIFEST} has another sync)"
        report(Damage(path, None, cause, promise.records, None))
        return True
    size = path.stat().st_size
    if size < promise.bytes:
        lost = promise.records - reader.end()[0].record
        cause = f"it was cut: {size} bytes, where {MANIFEST} says {promise.bytes}"
        report(Damage(path, size, cause, lost, None))
    elif reader.digest(promise.bytes) not in (None, promise.digest):
        cause = f"its blocks are not those that were written ({MANIFEST} has another digest)"
        report(Damage(path, None, cause, None, None))
    return False


def _without(path: Path, error: DataError) -> str:
    return str(error).removeprefix(f"{path}: ")
