"""Reads batches in separate processes on Ray (data ingestion, arXiv 2108.09373)."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.api import Ingestion, hookimpl, plan_modes

REQUIRES_API = 2


@hookimpl
def register_ingestions() -> Sequence[type[Ingestion]]:
    from recd_plugin_dsi.ray_ingestion import RayIngestion

    return [RayIngestion]


@hookimpl
def register_plans() -> Sequence[type[plan_modes.PlanMode]]:
    from recd_plugin_dsi.plan_readers import ReadersPlan

    return [ReadersPlan]
