"""Imports and plans: work that makes much at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """A context for imports and plans: what they make stays, and nobody looks for garbage in it.

    Of the time in which torch, torchrec and the trainer are imported, collections take a quarter.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
