"""Imports that take long, and of libraries that may be missing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from recd_plugins.runtime.errors import SetupError


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


def optional_library(module: str, extra: str, what: str) -> Any:
    """A module of a library, imported.

    Args:
        module: its name.
        extra: of recd-plugins, which brings it.
        what: needs it, for the message.

    Raises:
        SetupError: it is not installed; says the command that does it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise SetupError(
            f'{what} needs {module.partition(".")[0]}: pip install "recd-plugins[{extra}]" '
            f"({error})"
        ) from error
