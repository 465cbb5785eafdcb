"""pluggy hooks that a plugin package may implement. Every hook is optional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from recd_plugins.interfaces import (
        Cache,
        Converter,
        Dataset,
        Ingestion,
        Kind,
        Plugin,
        Pooling,
        Preprocessing,
        Sharding,
    )

hookspec = pluggy.HookspecMarker("recd_plugins")
hookimpl = pluggy.HookimplMarker("recd_plugins")
"""Decorator for functions that implement a hook."""


@hookspec
def register_datasets() -> Sequence[type[Dataset]]:  # type: ignore[empty-body]
    """Return dataset and dataset wrapper classes."""


@hookspec
def register_converters() -> Sequence[type[Converter]]:  # type: ignore[empty-body]
    """Return converter classes."""


@hookspec
def register_preprocessing() -> Sequence[type[Preprocessing]]:  # type: ignore[empty-body]
    """Return preprocessing classes."""


@hookspec
def register_ingestions() -> Sequence[type[Ingestion]]:  # type: ignore[empty-body]
    """Return ingestion classes."""


@hookspec
def register_shardings() -> Sequence[type[Sharding]]:  # type: ignore[empty-body]
    """Return sharding classes."""


@hookspec
def register_caches() -> Sequence[type[Cache]]:  # type: ignore[empty-body]
    """Return cache classes."""


@hookspec
def register_poolings() -> Sequence[type[Pooling]]:  # type: ignore[empty-body]
    """Return pooling classes."""


@hookspec
def register_plugins() -> Sequence[type[Plugin]]:  # type: ignore[empty-body]
    """Return plugin classes of any kind, including kinds from other packages."""


@hookspec
def register_kinds() -> Sequence[Kind]:  # type: ignore[empty-body]
    """Return additional plugin kinds, each configured in its own section of registry.yaml."""


@hookspec
def register_commands(cli: click.Group) -> None:
    """Add commands to the ``recd`` command line."""


@hookspec
def register_starts() -> Sequence[click.Command]:  # type: ignore[empty-body]
    """Return subcommands of ``recd init``. The one named ``TABLE`` handles data files."""


@hookspec
def register_plans() -> Sequence[type]:  # type: ignore[empty-body]
    """Return ``PlanMode`` classes, which add modes to ``recd plan``."""


@hookspec
def register_measurements() -> Sequence[type]:  # type: ignore[empty-body]
    """Return classes that measure cluster speed (``Measurement``). Only the last one is used."""


@hookspec
def register_reports() -> Sequence[type]:  # type: ignore[empty-body]
    """Return ``RunReport`` classes, which write report files of ``recd run``."""
