"""A registry with entries in place of ``auto``."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import replace

from recd_plugins.interfaces import Sharding
from recd_plugins.interfaces.auto import Auto
from recd_plugins.planning.auto.groups import Offer
from recd_plugins.registry import Entry, Registry


def auto_of(registry: Registry) -> Entry[Sharding] | None:
    """The entry ``auto``, if there is one."""
    return next((entry for entry in registry.sharding if isinstance(entry.plugin, Auto)), None)


def with_offers(
    registry: Registry, auto: Entry[Sharding], offers: Sequence[tuple[Offer, Sequence[str]]]
) -> Registry:
    """The registry with an entry for each offer, and its tables, in place of ``auto``."""
    plugins: Mapping[str, type[Sharding]] = {cls.name: cls for cls in registry.offering}
    chosen = tuple(
        Entry(
            plugins[offer.use](plugins[offer.use].Options.model_validate(offer.options)),
            tuple(glob.escape(name) for name in names),
            f"{auto.field}.chosen[{number}]",
            auto.line,
        )
        for number, (offer, names) in enumerate(offers)
    )
    at = registry.sharding.index(auto)
    entries = (*registry.sharding[:at], *chosen, *registry.sharding[at + 1 :])
    return replace(registry, sharding=entries, offering=())
