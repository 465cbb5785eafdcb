"""A registry with entries in place of its chooser."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from recd_plugins.interfaces import Chooser, Offered, Sharding
from recd_plugins.registry import Entry, Registry


def chooser_of(registry: Registry) -> Entry[Chooser] | None:
    """The entry of a chooser, if there is one."""
    found = (entry for entry in registry.sharding if isinstance(entry.plugin, Chooser))
    return cast("Entry[Chooser] | None", next(found, None))


def with_offers(registry: Registry, chooser: Entry[Sharding], offered: Offered) -> Registry:
    """The registry with an entry for each offer, and its tables, in place of its chooser."""
    plugins: Mapping[str, type[Sharding]] = {cls.name: cls for cls in registry.offering}
    chosen = tuple(
        Entry(
            plugins[offer.use](plugins[offer.use].Options.model_validate(offer.options)),
            tuple(glob.escape(name) for name in names),
            f"{chooser.field}.chosen[{number}]",
            chooser.line,
        )
        for number, (offer, names) in enumerate(offered)
    )
    at = registry.sharding.index(chooser)
    entries = (*registry.sharding[:at], *chosen, *registry.sharding[at + 1 :])
    return replace(registry, sharding=entries, offering=())
