"""The consoles of commands, which show control characters of data as escapes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from recd_plugins.visible_text import visible

#: Wide enough for any table and any line.
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
    """Standard output: as wide as the terminal, or as ``COLUMNS`` says.

    Into a pipe or a file lines are as long as they need to be: nothing there is cut or wrapped.
    """
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return _VisibleConsole(width=None if has_width else _UNLIMITED)


def error_console() -> Console:
    """Return a console on standard error, for progress bars and status lines."""
    return _VisibleConsole(stderr=True)
