"""Reading a log from where the last reading ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from recd_plugin_recd.logs.check import readable_shards
from recd_plugin_recd.logs.damage import Report
from recd_plugin_recd.logs.shard_reader import Position, ShardReader
from recd_plugins.api import DataError
from recd_plugins.api.files import check_regular, parse_json, write_json


@dataclass(frozen=True)
class LogRows:
    """Adjacent records of one shard, the first of them number ``first_record``."""

    shard: str
    first_record: int
    rows: pa.RecordBatch


class Consumer:
    """Hands out the records of a log, shard after shard, from its position on.

    The position moves as rows are handed out, and past damage as soon as a whole block follows it.
    ``commit`` writes it to ``offsets``, whole or not at all; a new consumer starts from there.

    Args:
        folder: of the log, or one shard file.
        offsets: a JSON file; None, or one that is missing, starts with the first records.
        report: is handed what is damaged, as it is met.

    Raises:
        DataError: there is no log; its shards do not belong together, or none can be read; the
            offsets are damaged or of another log.
    """

    def __init__(self, folder: Path, offsets: Path | None, report: Report) -> None:
        self._offsets = offsets
        self._report = report
        self._shards: dict[str, Path] = {}
        self._identities: dict[str, str] = {}
        self._positions: dict[str, Position] = {}
        self.schema = self._open(folder)
        if offsets is not None and os.path.lexists(offsets):
            self.load(_read_offsets(offsets))

    def __iter__(self) -> Iterator[LogRows]:
        """Records up to the ends of the shards as they are when each is reached."""
        for name, path in self._shards.items():
            with ShardReader(path, self._report) as reader:
                for block in reader.blocks(self._positions[name]):
                    self._positions[name] = block.end
                    yield LogRows(name, block.first_record, block.rows)

    def seek(self, shard: str, record: int) -> None:
        """Go on in ``shard`` with record number ``record``, counted from 0."""
        with ShardReader(self._shards[shard], self._report) as reader:
            self._positions[shard] = Position(reader.start.offset, record)

    def state(self) -> dict[str, Any]:
        """The position as JSON values: of each shard its identity, a byte and a record."""
        return {
            name: {"log": self._identities[name], **asdict(position)}
            for name, position in self._positions.items()
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take up a position.

        Raises:
            DataError: it is of another log, or beyond the end of this one.
        """
        for name, said in state.items():
            if name not in self._shards or said["log"] != self._identities[name]:
                raise DataError(
                    f"{self._offsets}: offsets of another log than {self._folder} (shard {name}); "
                    "remove them to start from the first record"
                )
            size = self._shards[name].stat().st_size
            if said["offset"] > size:
                raise DataError(
                    f"{self._shards[name]}: {size} bytes, but {said['offset']} were read before: "
                    "it has been cut; remove the offsets to start from the first record"
                )
            self._positions[name] = Position(said["offset"], said["record"])

    def commit(self) -> None:
        """Write the position to the offsets file."""
        if self._offsets is None:
            raise ValueError("a consumer without an offsets file commits nothing")
        write_json(self._offsets, {"version": 1, "shards": self.state()})

    def _open(self, folder: Path) -> pa.Schema:
        self._folder = folder
        schemas: dict[Path, pa.Schema] = {}
        for path in readable_shards(folder, self._report):
            with ShardReader(path, self._report) as reader:
                schemas[path] = reader.header.schema
                self._shards[path.name] = path
                self._identities[path.name] = reader.header.sync.hex()
                self._positions[path.name] = reader.start
        if not schemas:
            raise DataError(f"{folder}: no shard can be read")
        first = next(iter(schemas))
        for path, schema in schemas.items():
            if not schema.equals(schemas[first], check_metadata=True):
                raise DataError(f"{path}: other columns than in {first}: not shards of one log")
        return schemas[first]


def _read_offsets(path: Path) -> dict[str, Any]:
    try:
        check_regular(path)
        wrong = _wrong_in(said := parse_json(path.read_text()))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        said, wrong = None, f"it is no JSON ({error})"
    if wrong is not None:
        raise DataError(
            f"{path}: no offsets of a log: {wrong}; remove it to start from the first record"
        )
    shards: dict[str, Any] = said["shards"]
    return shards


def _wrong_in(said: Any) -> str | None:
    """What is wrong with the content of a file of offsets."""
    if not isinstance(said, dict) or not isinstance(said.get("shards"), dict):
        return "it has no object 'shards'"
    for name, shard in said["shards"].items():
        if not isinstance(shard, dict) or not isinstance(shard.get("log"), str):
            return f"{name} does not say of which 'log' it is"
        for field in ("offset", "record"):
            number = shard.get(field)
            if type(number) is not int or number < 0:
                return f"{name} has {number!r} as its {field!r}, not a whole number from 0 on"
    return None
