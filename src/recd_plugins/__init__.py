"""Plugins that make TorchRec training cheaper and leave it exactly what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recd_plugins.distributed.table_report import describe_tables
    from recd_plugins.registry import Registry, load_registry

__version__ = "0.1.0"
__all__ = ["Registry", "__version__", "describe_tables", "load_registry"]


def __getattr__(name: str) -> Any:
    """Import names when they are asked for, so that ``import recd_plugins`` stays light."""
    if name in ("Registry", "load_registry"):
        from recd_plugins import registry

        return getattr(registry, name)
    if name == "describe_tables":
        from recd_plugins.distributed.table_report import describe_tables

        return describe_tables
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
