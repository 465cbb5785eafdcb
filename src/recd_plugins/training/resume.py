"""What a resumed run takes from its newest checkpoint before the model: preprocessing and plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from pydantic import ValidationError

from recd_plugins.config import RunConfig
from recd_plugins.data.preprocess import fitted_steps, load_fitted_state
from recd_plugins.interfaces import Candidate, Preprocessing
from recd_plugins.planning.choosing import chooser_of, with_offers
from recd_plugins.runtime.rank_agreement import check_agreement
from recd_plugins.training.checkpoint_files import (
    FITTED,
    DamagedError,
    checkpoints_in,
    read_arrays,
)
from recd_plugins.training.identity import (
    read_identity,
    read_schema,
    same_preprocessing,
    sharding_identity,
)


def load_fitted(registry: RunConfig, checkpoint: Path) -> None:
    """Restore the fitted preprocessing of a checkpoint.

    Entries that the checkpoint lacks, or that have other options now, are fitted when they are
    used; the identity tells whether they are the same then.

    Raises:
        DamagedError: the file was changed.
    """
    if registry.preprocessing:
        arrays = read_arrays(checkpoint, FITTED)
        state = {name: torch.from_numpy(each) for name, each in arrays.items()}
        if state:
            load_fitted_state(registry, state, same_preprocessing(checkpoint, registry))


def resume_fitted(registry: RunConfig) -> None:
    """Restore the fitted preprocessing of the newest whole checkpoint."""
    for checkpoint in _newest_first(registry):
        try:
            load_fitted(registry, checkpoint)
        except DamagedError:  # told when weights are loaded
            continue
        return


def check_fitted_alike(registry: RunConfig) -> None:
    """Fit preprocessing, and refuse ranks that fitted otherwise. Collective."""
    fits = [
        entry.plugin
        for entry in registry.preprocessing
        if type(entry.plugin).fit is not Preprocessing.fit
    ]
    if not fits:
        return

    fitted_steps(registry, registry.dataset.schema())
    decided = {
        f"fit of {plugin.title} to {feature}": step.identity()
        for plugin in fits
        for feature, step in (plugin.fitted or {}).items()
    }
    check_agreement("fitting preprocessing", decided)


def resume_choice(registry: RunConfig, *, quiet: bool = False) -> RunConfig:
    """Replace a chooser by the entries that the newest whole checkpoint was trained with.

    A chooser decides by measurements, which differ from start to start.
    """
    chooser = chooser_of(registry)
    if chooser is None:
        return registry
    for checkpoint in _newest_first(registry):
        try:
            identity = read_identity(checkpoint)
        except DamagedError:  # told when weights are loaded
            continue
        entries, tables = identity["sharding"], list(identity["model"]["tables"])
        at = registry.sharding.index(chooser)
        own = sharding_identity(registry, tables)
        before, after = own[:at], own[at + 1 :]
        end = len(entries) - len(after)
        chosen = entries[at:end]
        fits = (
            (end >= at and entries[:at] == before and entries[end:] == after)
            and read_schema(checkpoint).sparse == tuple(registry.dataset.schema().sparse)
            and _is_installed(registry, chosen)
        )
        if not quiet:
            takes = "takes" if fits else "chooses anew: this registry or installation cannot take"
            plugin = chooser.plugin.name
            words = _words(chosen)
            click.echo(f"{plugin} {takes} what {checkpoint} was trained with: {words}", err=True)
        if not fits:
            return registry
        offers = [(Candidate(e["use"], e.get("options", {})), e["tables"]) for e in chosen]
        return with_offers(registry, chooser, offers)
    return registry


def _newest_first(registry: RunConfig) -> Iterator[Path]:
    folder = registry.training.checkpoint.path
    return reversed(checkpoints_in(Path(folder)) if folder is not None else [])


def _is_installed(registry: RunConfig, chosen: Sequence[dict[str, Any]]) -> bool:
    """Return whether the installed plugins can repeat a choice."""
    installed = {cls.name: cls for cls in registry.offering}
    try:
        for entry in chosen:
            installed[entry["use"]].Options.model_validate(entry.get("options", {}))
    except (KeyError, ValidationError):
        return False
    return True


def _words(entries: Sequence[dict[str, Any]]) -> str:
    words = (
        f"{entry['use']} for {n} table{'s' * (n != 1)}"
        for entry in entries
        for n in [len(entry["tables"])]
    )
    return ", ".join(words) or "the planner"
