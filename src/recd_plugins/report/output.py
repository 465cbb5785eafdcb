r"""Consoles and standard streams that escape control characters in printed data.

A column named ``\x1b]0;...`` could otherwise set the title of a terminal or hide text.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_C0 = [code for code in range(0x20) if chr(code) not in "\n\t"]
_DEL_AND_C1 = range(0x7F, 0xA0)
_BIDI = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
# JSON supports \u007f, but not \x7f.
_ESCAPES = {
    **{code: f"\\x{code:02x}" for code in _C0},
    **{code: f"\\u{code:04x}" for code in (*_DEL_AND_C1, *_BIDI)},
}
# A complete message in one style, as click.secho writes it, or a progress bar after a \r.
_STYLED = re.compile(r"((?:\x1b\[(?:1|[39]\d)m)+|\r)(.*?)((?:\x1b\[0m)?\n?)", re.DOTALL)


def visible(text: str) -> str:
    """Escape control characters except tabs and line breaks in a text."""
    if text.isprintable():
        return text
    return "\r\n".join(line.translate(_ESCAPES) for line in text.split("\r\n"))


def show_controls(stream: TextIO) -> None:
    """Make a stream escape control characters in the texts that are written to it.

    The styles of ``click.secho``, the output of rich consoles, and carriage returns at the start of
    a text or the end of a line are not escaped.
    """
    if not isinstance(stream, io.TextIOWrapper) or "write" in vars(stream):
        return
    write = stream.write

    def write_visible(text: str) -> int:
        here = inspect.currentframe()
        caller = here and here.f_back
        if caller and caller.f_globals.get("__name__") == "rich.console":
            write(text)
        elif styled := _STYLED.fullmatch(text):
            before, message, after = styled.groups()
            write(f"{before}{visible(message)}{after}")
        else:
            write(visible(text))
        return len(text)

    stream.write = write_visible  # type: ignore[method-assign]


def prepare_output() -> None:
    """Make stdout and stderr escape control characters."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Show the bytes of file names that are not UTF-8.
            stream.reconfigure(errors="surrogateescape")
        show_controls(stream)


#: Width that is large enough for every table and line.
_UNLIMITED = 10_000


class _VisibleConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def output_console() -> Console:
    """Return a rich console for stdout. Lines in pipes and files never wrap."""
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return _VisibleConsole(width=None if has_width else _UNLIMITED)


def error_console() -> Console:
    """Return a rich console for stderr, used for progress bars and status lines."""
    return _VisibleConsole(stderr=True)


_NOBODY_READS = (errno.EPIPE, errno.EIO)


@contextmanager
def persistent_output() -> Iterator[None]:
    """Within this context, ignore writes to stdout and stderr whose pipe or terminal is closed."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_persistent, before, (sys.__stdout__, sys.__stderr__))
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


def _persistent(stream: TextIO, of_process: TextIO | None) -> TextIO:
    if stream is not of_process or not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    persistent = io.TextIOWrapper(
        io.BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )
    show_controls(persistent)
    return persistent
