"""What a chooser came to when a run was started, for the run that goes on from its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from recd_plugins.interfaces import Offer
from recd_plugins.planning.choosing.entries import chooser_of, with_offers, wrong_options
from recd_plugins.registry import RunConfig
from recd_plugins.training.checkpoint_files.errors import DamagedError
from recd_plugins.training.checkpoint_files.folder import checkpoints_in
from recd_plugins.training.identity import read_schema, read_sharding, sharding_identity


def resume_choice(registry: RunConfig, *, quiet: bool = False) -> RunConfig:
    """The registry with the entries of the newest checkpoint that is whole in place of its chooser.

    What is measured at a start differs from start to start, and by it what would be chosen.

    Args:
        registry: as its file says; it stays as it is without a chooser or without a checkpoint.
        quiet: do not say on stderr what becomes of it.
    """
    chooser = chooser_of(registry)
    folder = registry.training.checkpoint.path
    if chooser is None or folder is None:
        return registry
    name = chooser.plugin.name
    for checkpoint in reversed(checkpoints_in(Path(folder))):
        try:
            entries, tables = read_sharding(checkpoint)
        except DamagedError:  # told when weights are loaded
            continue
        at = registry.sharding.index(chooser)
        own = sharding_identity(registry, tables)
        before, after = own[:at], own[at + 1 :]
        end = len(entries) - len(after)
        chosen = entries[at:end]
        if end < at or entries[:at] != before or entries[end:] != after:
            why = "other sharding entries are not those of then"
        elif read_schema(checkpoint).sparse != tuple(registry.dataset.schema().sparse):
            why = "the data has other features than then"
        elif not (why := _why_not(registry, chosen)):
            if not quiet:
                words = f"{name} takes what {checkpoint} was trained with: {_words(chosen)}"
                click.echo(words, err=True)
            offers = [(Offer(e["use"], e.get("options", {})), e["tables"]) for e in chosen]
            return RunConfig(**vars(with_offers(registry, chooser, offers)))
        if not quiet:
            words = (
                f"{name} does not take what {checkpoint} was trained with, and chooses anew: {why}"
            )
            click.echo(words, err=True)
        return registry
    return registry


def _why_not(registry: RunConfig, chosen: Sequence[dict[str, Any]]) -> str:
    """Why the plugins of now cannot be taken as they were then; empty where they can."""
    installed = {cls.name: cls for cls in registry.offering}
    for entry in chosen:
        if (use := entry["use"]) not in installed:
            return f"{use} is not installed"
        if wrong := wrong_options(installed[use], entry.get("options", {})):
            return f"{use} has other options now: {wrong}"
    return ""


def _words(entries: Sequence[dict[str, Any]]) -> str:
    words = (f"{entry['use']} for {_counted(entry['tables'])}" for entry in entries)
    return ", ".join(words) or "the planner"


def _counted(tables: Sequence[str]) -> str:
    return "1 table" if len(tables) == 1 else f"{len(tables)} tables"
