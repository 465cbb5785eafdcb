"""The libraries of trackers, which need not be installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from recd_plugins.api import SetupError


def library(name: str, tracker: str, extra: str) -> Any:
    """A module of a library that a tracker writes to.

    Raises:
        SetupError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise SetupError(
            f"{tracker} needs {name.partition('.')[0]} ({error}): pip install "
            f"'recd-plugins[{extra}]'"
        ) from error
