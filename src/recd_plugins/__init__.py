"""Plugins that make TorchRec training cheaper and leave it exactly what it was."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recd_plugins.config import RunConfig
    from recd_plugins.config.from_file import load_registry
    from recd_plugins.drop_in.dedup import Dedup
    from recd_plugins.drop_in.pooled_sequences import PooledSequences
    from recd_plugins.drop_in.wrap import wrap
    from recd_plugins.planning.choosing import prepare
    from recd_plugins.runtime.versions import __version__
    from recd_plugins.sharding.table_report import describe_tables

# Imported when they are asked for, so that ``import recd_plugins`` stays light.
_HOME = {
    "Dedup": "drop_in.dedup",
    "PooledSequences": "drop_in.pooled_sequences",
    "RunConfig": "config",
    "__version__": "runtime.versions",
    "describe_tables": "sharding.table_report",
    "load_registry": "config.from_file",
    "prepare": "planning.choosing",
    "wrap": "drop_in.wrap",
}

__all__ = [
    "Dedup",
    "PooledSequences",
    "RunConfig",
    "__version__",
    "describe_tables",
    "load_registry",
    "prepare",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
