"""Counts bad messages, which are no valid rows, and writes them to files."""

from __future__ import annotations

import json
from pathlib import Path

from recd_plugin_streaming.options import say
from recd_plugins.api import DataError


class DeadLetters:
    """Counts and stores the bad messages of one rank.

    Args:
        folder: folder for a JSON Lines file per partition; None writes no files. Bytes that are not
            UTF-8 are written as surrogate escapes.
        most: number of bad messages above which ``add`` raises DataError.
        topic: name of the topic, part of the file names.
    """

    def __init__(self, folder: Path | None, most: int, topic: str) -> None:
        self._folder, self._most, self._topic = folder, most, topic
        self._last: dict[str, int] = {}
        self.count = 0

    def add(self, partition: str, offset: int, value: bytes | None, reason: str) -> None:
        """Count a bad message, and write it to its partition's file unless the file has it already.

        Raises:
            DataError: there are more than ``most`` bad messages.
        """
        self.count += 1
        if self.count == 1:
            say(
                f"{self._topic}: partition {partition}, offset {offset} is not trained: {reason}. "
                "Further such messages are only counted."
            )
        if self._folder is not None:
            path = self._folder / f"{self._topic}.{partition}.jsonl"
            if partition not in self._last:
                self._last[partition] = _last_offset(path)
            if offset > self._last[partition]:
                text = None if value is None else value.decode(errors="surrogateescape")
                entry = {"offset": offset, "reason": reason, "value": text}
                with path.open("ab", buffering=0) as file:
                    file.write(json.dumps(entry).encode() + b"\n")
                self._last[partition] = offset
        if self.count > self._most:
            raise DataError(
                f"{self._topic}: {self.count} messages cannot be trained, more than "
                f"max_bad_messages ({self._most}). The last one is partition {partition}, offset "
                f"{offset}: {reason}. Repair the producer or the option 'columns', or raise "
                "max_bad_messages"
            )


def _last_offset(path: Path) -> int:
    """Return the last offset in a file, or -1. Removes a line that a killed run left incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        *lines, rest = file.read().split(b"\n")
        file.truncate(file.tell() - len(rest))
    return int(json.loads(lines[-1])["offset"]) if lines else -1
