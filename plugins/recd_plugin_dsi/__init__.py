"""Data storage and ingestion (arXiv 2108.09373): readers that run apart from trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from recd_plugins.interfaces import Dataset


@hookimpl
def register_datasets() -> Sequence[type[Dataset]]:
    return []
