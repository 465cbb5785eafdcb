"""The console on which commands print what they found."""

from __future__ import annotations

import os
import sys

from rich.console import Console

#: Wide enough for any table and any line.
_UNLIMITED = 10_000


def output_console() -> Console:
    """Standard output: as wide as the terminal, or as ``COLUMNS`` says.

    Into a pipe or a file lines are as long as they need to be: nothing there is cut or wrapped.
    """
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if has_width else _UNLIMITED)
