"""How much a registry file may hold, so that none takes the machine's memory or minutes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import Node

#: Bytes of a file.
MOST_BYTES = 1 << 20
#: Keys, values and items, those that aliases repeat counted each time. A table's size takes four.
MOST_VALUES = 50_000
#: Mappings and lists inside one another; the schema needs eight.
DEEPEST = 64

TOO_MANY = f"more than {MOST_VALUES:,} keys, values and items, which is the most"
TOO_DEEP = f"nested deeper than {DEEPEST} levels, which is the most"


class TooMuchError(MarkedYAMLError):
    """A file holds more than ``BoundedComposer`` takes; problem and mark are set."""


class BoundedComposer(Composer):
    """ruamel's composer of nodes, which stops at ``MOST_VALUES`` and ``DEEPEST``."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader)
        self._num_values = self._levels = 0

    def compose_node(self, parent: Any, index: Any) -> Node:
        """See the base class.

        Raises:
            TooMuchError: the node is one too many, or too deep.
        """
        self._num_values += 1
        self._levels += 1
        problem = (
            TOO_MANY
            if self._num_values > MOST_VALUES
            else TOO_DEEP
            if self._levels > DEEPEST
            else None
        )
        if problem is not None:
            mark = self.parser.peek_event().start_mark
            raise TooMuchError(problem=problem, problem_mark=mark)
        node: Node = super().compose_node(parent, index)
        self._levels -= 1
        return node


def read_small_file(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file or is too large; the message goes behind its name.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):  # a pipe that nobody writes to would be waited for
        raise ValueError("is no regular file; it is read more than once, so write it to one first")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"is larger than {MOST_BYTES:,} bytes, which is the most")
    return data
