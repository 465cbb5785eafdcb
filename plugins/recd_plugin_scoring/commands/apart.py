"""Outputs that stay apart from what they are made of."""

from __future__ import annotations

from pathlib import Path

from recd_plugins.api import RecdError
from recd_plugins.api.registry import Registry


def check_apart(output: Path, registry: Registry, *made_from: Path) -> None:
    """Refuse an output in place of, or in a folder of, what it is made from or was trained on.

    Raises:
        RecdError: names which.
    """
    options = (value for _, value in registry.dataset.options)
    for path in (*made_from, *(value for value in options if isinstance(value, Path))):
        if output.resolve().is_relative_to(path.resolve()):
            raise RecdError(f"{output}: would be written over or into {path}; name another file")
