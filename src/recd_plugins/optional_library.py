"""Libraries that an extra of recd-plugins brings, and that need not be installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from recd_plugins.errors import SetupError


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
