"""Data storage and ingestion (arXiv 2108.09373): readers that run apart from trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import Ingestion, PlanMode, hookimpl

if TYPE_CHECKING:
    from recd_plugins.api import Internal

REQUIRES_API = 2


@hookimpl
def register_ingestions() -> Sequence[type[Ingestion]]:
    from recd_plugin_dsi.ray_ingestion import RayIngestion

    return [RayIngestion]


@hookimpl
def register_plans() -> Sequence[type[PlanMode]]:
    from recd_plugin_dsi.plan_readers import ReadersPlan

    return [ReadersPlan]


@hookimpl
def register_internals() -> Sequence[Internal]:
    from recd_plugin_dsi.internals import INTERNALS

    return INTERNALS
