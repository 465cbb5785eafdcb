"""Checks that the internals of TorchRec which this package leans on are there."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from recd_plugins.errors import SetupError


def require_attributes(owner: Any, *names: str) -> None:
    """Refuse a TorchRec whose ``owner`` lacks one of ``names``, rather than do nothing silently.

    Raises:
        SetupError: names the attribute and the versions that have it.
    """
    for name in names:
        if not hasattr(owner, name):
            what = owner.__name__ if isinstance(owner, type) else type(owner).__name__
            raise SetupError(
                f"torchrec {version('torchrec')} has no {what}.{name}, which exact training needs; "
                "install one of torchrec 1.6 to 1.9"
            )
