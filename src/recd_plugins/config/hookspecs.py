"""Every hook of recd-plugins. A plugin package implements the ones it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click
    from pydantic import BaseModel

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
    from recd_plugins.runtime.versions import Internal

hookspec = pluggy.HookspecMarker("recd_plugins")
hookimpl = pluggy.HookimplMarker("recd_plugins")
"""The decorator of functions that implement a hook."""


@hookspec
def register_datasets() -> Sequence[type[Dataset]]:  # type: ignore[empty-body]
    """Dataset classes: a location becomes Arrow record batches. Wrappers of datasets are some."""


@hookspec
def register_converters() -> Sequence[type[Converter]]:  # type: ignore[empty-body]
    """Converter classes: a record batch becomes a Batch."""


@hookspec
def register_preprocessing() -> Sequence[type[Preprocessing]]:  # type: ignore[empty-body]
    """Preprocessing classes: jagged values become other jagged values."""


@hookspec
def register_ingestions() -> Sequence[type[Ingestion]]:  # type: ignore[empty-body]
    """Ingestion classes: who makes the batches of a rank, in other processes or elsewhere."""


@hookspec
def register_shardings() -> Sequence[type[Sharding]]:  # type: ignore[empty-body]
    """Sharding classes: where the rows of tables live."""


@hookspec
def register_caches() -> Sequence[type[Cache]]:  # type: ignore[empty-body]
    """Cache classes: fast memory in front of tables."""


@hookspec
def register_poolings() -> Sequence[type[Pooling]]:  # type: ignore[empty-body]
    """Pooling classes: a sequence of embeddings becomes one vector a row."""


@hookspec
def register_topology_sections() -> Mapping[str, type[BaseModel]]:  # type: ignore[empty-body]
    """Sections of topology files by name; each says what was measured on the machines."""


@hookspec
def register_plugins() -> Sequence[type[Plugin]]:  # type: ignore[empty-body]
    """Plugin classes of any kinds, those of others' packages too: each says which by ``kind``."""


@hookspec
def register_kinds() -> Sequence[Kind]:  # type: ignore[empty-body]
    """Kinds of plugins, each with a section of registry files of its own."""


@hookspec
def register_commands(cli: click.Group) -> None:
    """Add commands to the ``recd`` command line."""


@hookspec
def register_starts() -> Sequence[click.Command]:  # type: ignore[empty-body]
    """Commands of ``recd init``, each by the name that stands after it, or ``TABLE``."""


@hookspec
def register_plans() -> Sequence[type]:  # type: ignore[empty-body]
    """Modes of ``recd plan``, classes ``PlanMode``: what a flag plans in place of the tables."""


@hookspec
def register_measurements() -> Sequence[type]:  # type: ignore[empty-body]
    """Ways to measure machines, classes ``Measurement``; the last counts."""


@hookspec
def register_reports() -> Sequence[type]:  # type: ignore[empty-body]
    """Files that ``recd run`` writes of a run, classes ``RunReport``."""


@hookspec
def register_internals() -> Sequence[Internal]:  # type: ignore[empty-body]
    """Names without a public form that the package relies on, of TorchRec, say; for doctor."""
