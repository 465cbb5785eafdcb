"""Reads batches in separate processes on Ray (data ingestion, arXiv 2108.09373)."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.api import Ingestion, Internal, hookimpl, plan_modes

REQUIRES_API = 2


@hookimpl
def register_ingestions() -> Sequence[type[Ingestion]]:
    from recd_plugin_dsi.ray_ingestion import RayIngestion

    return [RayIngestion]


@hookimpl
def register_plans() -> Sequence[type[plan_modes.PlanMode]]:
    from recd_plugin_dsi.plan_readers import ReadersPlan

    return [ReadersPlan]


@hookimpl
def register_internals() -> Sequence[Internal]:
    kv = ("_internal_kv_del", "_internal_kv_put")
    return (
        Internal("ray.data", ("_internal",), "changing the number of readers during a run"),
        Internal(
            "ray.experimental.internal_kv",
            kv,
            "detecting that a reader died and its block is read again",
        ),
    )
