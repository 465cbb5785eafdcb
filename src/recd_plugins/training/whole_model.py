"""The model of a checkpoint in one piece, in this process alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
from torch import nn

from recd_plugins.data.fitted_steps import fitted_steps
from recd_plugins.errors import SetupError
from recd_plugins.model.build import build_model
from recd_plugins.model.poolings import put_poolings
from recd_plugins.model_tables import tables_of
from recd_plugins.planning.prepare import prepare
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.setting import id_limits
from recd_plugins.planning.topologies import MACHINE
from recd_plugins.registry import RunConfig
from recd_plugins.training.checkpoint_dcp import load_weights
from recd_plugins.training.checkpoint_files import check_whole
from recd_plugins.training.identity import check_scores
from recd_plugins.training.resume import load_fitted


def whole_model(registry: RunConfig, checkpoint: Path) -> Prepared:
    """A trained model with its poolings and preprocessing, whatever sharding it was trained by.

    Says where the data is not what it was trained on.

    Args:
        registry: that it was trained by; its data is prepared.
        checkpoint: as ``chosen_checkpoint`` gives it.

    Raises:
        RecdError: the checkpoint is damaged or of another model; says both.
    """
    whole = _as_fitted(registry, checkpoint)
    # Poolings are put in before their weights are loaded.
    prepared = prepare(whole, build_model(whole, whole.dataset.schema()))
    if not _fill(prepared.model, registry, checkpoint):
        say_other_data(checkpoint)
    return prepared


def unchecked_model(registry: RunConfig, checkpoint: Path) -> nn.Module:
    """The same model without what looks at its batches, which no tracer can follow.

    Raises:
        RecdError: as ``whole_model``.
    """
    whole = _as_fitted(registry, checkpoint)
    model = build_model(whole, whole.dataset.schema())
    put_poolings(whole, model)
    _fill(model, registry, checkpoint)
    return model


def say_other_data(checkpoint: Path) -> None:
    """Say that the data is not what a checkpoint was trained on."""
    click.echo(
        f"The data is not what {checkpoint} was trained on: rows that it has learnt may stand in "
        "the test split now",
        err=True,
    )


def _as_fitted(registry: RunConfig, checkpoint: Path) -> RunConfig:
    check_whole(checkpoint)
    load_fitted(registry, checkpoint)
    fitted_steps(registry, registry.dataset.schema())
    # Nothing is sharded here, so no cluster counts, wherever this runs.
    whole = registry.with_training({"topology": MACHINE})
    return replace(whole, sharding=(), cache=())


def _fill(model: nn.Module, registry: RunConfig, checkpoint: Path) -> bool:
    """Load the weights; whether the data is what they were trained on."""
    tables = tables_of(model)
    same_data = check_scores(checkpoint, registry, tables)
    rows = {table.name: table.num_embeddings for table in tables}
    for name, limit in id_limits(registry, tables).items():
        if limit != rows[name]:
            raise SetupError(
                f"{registry.path}: the sharding plugin of table {name} maps its ids, so the model "
                "cannot run unsharded; use recd predict or recd evaluate"
            )
    load_weights(checkpoint, model)
    return same_data
