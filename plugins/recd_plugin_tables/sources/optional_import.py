"""Libraries of table formats, imported where such a table is opened."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from recd_plugins.api import SetupError


def library(module: str, extra: str, what: str) -> Any:
    """A module of a library.

    Args:
        module: its name.
        extra: of this package, which brings it.
        what: the table that needs it.

    Raises:
        SetupError: it is not installed; says the command that does it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise SetupError(
            f'{what}: {module} is needed to read it: pip install "recd-plugins[{extra}]" ({error})'
        ) from error
