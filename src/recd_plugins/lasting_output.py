"""Output that outlives who reads it: a terminal that goes, a program behind a pipe that ends."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from recd_plugins.visible_text import show_controls

_NOBODY_READS = (errno.EPIPE, errno.EIO)


@contextmanager
def lasting_output() -> Iterator[None]:
    """A context in which nobody has to read what this process prints.

    As ``tee`` ends by the Ctrl-C that asks a run to end: to print would fail, and the run with it.
    From the first failure on, what is printed goes nowhere.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_lasting, before, (sys.__stdout__, sys.__stderr__))
    try:
        yield
    finally:
        for now, then in zip((sys.stdout, sys.stderr), before, strict=True):
            if now is not then:
                now.flush()
        sys.stdout, sys.stderr = before


class _Lasting(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes


def _lasting(stream: TextIO, of_process: TextIO | None) -> TextIO:
    """The stream, as it is where it is not the process's own."""
    if stream is not of_process or not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    lasting = io.TextIOWrapper(
        io.BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )
    show_controls(lasting)
    return lasting
