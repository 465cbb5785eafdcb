"""Preprocessing as a checkpoint has it, in place of fitting it anew."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from recd_plugins.data.fitted_state import load_fitted_state
from recd_plugins.data.fitted_steps import fitted_steps
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Preprocessing
from recd_plugins.registry import RunConfig
from recd_plugins.training.agreement import together
from recd_plugins.training.checkpoint_files.arrays import FITTED, read_arrays
from recd_plugins.training.checkpoint_files.errors import DamagedError
from recd_plugins.training.checkpoint_files.folder import checkpoints_in
from recd_plugins.training.identity import same_preprocessing


def load_fitted(registry: RunConfig, checkpoint: Path) -> None:
    """What the preprocessing of a registry was when a checkpoint was written.

    Entries of which the checkpoint says nothing, or that have other options now, are fitted when
    they are used; whether they are the same then, the identity tells.

    Raises:
        DamagedError: the file is not as it was written.
    """
    if registry.preprocessing:
        arrays = read_arrays(checkpoint, FITTED)
        state = {name: torch.from_numpy(each) for name, each in arrays.items()}
        if state:
            load_fitted_state(registry, state, same_preprocessing(checkpoint, registry))


def resume_fitted(registry: RunConfig) -> None:
    """The same of the newest checkpoint of the registry that is whole, if there is any.

    All of a run have the same; which one the run goes on from is found later.
    """
    folder = registry.training.checkpoint.path
    for checkpoint in reversed(checkpoints_in(Path(folder)) if folder is not None else []):
        try:
            load_fitted(registry, checkpoint)
        except DamagedError:  # told when weights are loaded
            continue
        return


def check_fitted_alike(registry: RunConfig) -> None:
    """Fit what is to be, and refuse what was fitted otherwise on some rank. A collective call.

    Raises:
        PluginError: names the plugin and the feature.
    """
    fits = [
        entry.plugin
        for entry in registry.preprocessing
        if type(entry.plugin).fit is not Preprocessing.fit
    ]
    if not fits:
        return

    def identities() -> list[dict[str, str]]:
        fitted_steps(registry, registry.dataset.schema())
        return [
            {feature: json.dumps(step.identity()) for feature, step in plugin.fitted.items()}
            for plugin in fits
            if plugin.fitted is not None
        ]

    first, *others = together(identities)
    for rank, other in enumerate(others, 1):
        for plugin, here, there in zip(fits, first, other, strict=True):
            for feature, identity in here.items():
                if there.get(feature) != identity:
                    raise PluginError(
                        f"{plugin.title}: fit to {feature} decided {there.get(feature):.100} on "
                        f"rank {rank} and {identity:.100} on rank 0, by identity; every rank is "
                        "shown the same rows"
                    )
