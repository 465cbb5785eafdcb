"""A registry with entries in place of its chooser."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from pydantic import ValidationError

from recd_plugins.interfaces import Chooser, Offer, Offered, Sharding
from recd_plugins.registry import Entry, RunConfig
from recd_plugins.registry.resolve import in_words


def chooser_of(registry: RunConfig) -> Entry[Chooser] | None:
    """The entry of a chooser, if there is one."""
    found = (entry for entry in registry.sharding if isinstance(entry.plugin, Chooser))
    return cast("Entry[Chooser] | None", next(found, None))


def with_offers(registry: RunConfig, chooser: Entry[Sharding], offered: Offered) -> RunConfig:
    """The registry with an entry for each offer, and its tables, in place of its chooser."""
    plugins: Mapping[str, type[Sharding]] = {cls.name: cls for cls in registry.offering}

    def entry(number: int, offer: Offer, names: Sequence[str]) -> Entry[Sharding]:
        # In words: the file has no such place.
        field = f"{chooser.field}, choice {number} of {chooser.plugin.name}"
        plugin = plugins[offer.use]
        made = plugin(plugin.Options.model_validate(offer.options))
        made.placed((str(registry.path), chooser.line, field))
        return Entry(made, tuple(glob.escape(name) for name in names), field, chooser.line)

    chosen = tuple(entry(number, *each) for number, each in enumerate(offered, start=1))
    at = registry.sharding.index(chooser)
    entries = (*registry.sharding[:at], *chosen, *registry.sharding[at + 1 :])
    return replace(registry, sharding=entries, offering=())


def wrong_options(cls: type[Sharding], options: object) -> str:
    """What is wrong with ``options`` of a plugin, the first of it; empty where all are right."""
    if not isinstance(options, Mapping):
        return f"options: input should be a mapping, got {options!r:.200}"
    try:
        cls.Options.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "options"
        return f"{place}: {in_words(first, first['loc'], cls.Options, f'option of {cls.name}')}"
    return ""
