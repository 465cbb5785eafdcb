"""Plugins that make TorchRec training cheaper and leave it exactly what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recd_plugins.registry import Registry, load_registry

__version__ = "0.1.0"
__all__ = ["Registry", "__version__", "load_registry"]


def __getattr__(name: str) -> Any:
    """Import the registry when it is asked for, so that ``import recd_plugins`` stays light."""
    if name in ("Registry", "load_registry"):
        from recd_plugins import registry

        return getattr(registry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
