"""What sharders are made of, without a registry file: no entry, and a model without tables."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import nn

from recd_plugins.config.schema import TrainingSpec


def bare_registry(training: TrainingSpec) -> Any:
    """A registry that has nothing but how training runs."""
    return SimpleNamespace(training=training, sharding=(), cache=())


def bare_prepared(registry: Any, coalesced: Iterable[str] = ()) -> Any:
    """What ``build_sharders`` takes of a registry."""
    return SimpleNamespace(
        registry=registry,
        model=nn.Module(),
        checked_parts=(),
        lookup_kernels=(),
        tables=(),
        coalesced=frozenset(coalesced),
        chosen=None,
    )
