"""Process groups, sharders that are exact on every back end, and what collectives send."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recd_plugins.distributed.byte_counter import CollectiveBytes, lookup_ids
    from recd_plugins.distributed.guards import (
        check_every_parameter_is_trained,
        check_sharded_as_wholes,
        guard,
    )
    from recd_plugins.distributed.sharders import build_sharders, stock_sharders

_HOME = {
    "CollectiveBytes": "byte_counter",
    "build_sharders": "sharders",
    "check_every_parameter_is_trained": "guards",
    "check_sharded_as_wholes": "guards",
    "guard": "guards",
    "lookup_ids": "byte_counter",
    "stock_sharders": "sharders",
}

__all__ = [
    "CollectiveBytes",
    "build_sharders",
    "check_every_parameter_is_trained",
    "check_sharded_as_wholes",
    "guard",
    "lookup_ids",
    "stock_sharders",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: the parent of the ranks needs no torchrec."""
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
