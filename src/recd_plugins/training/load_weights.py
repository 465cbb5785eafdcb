"""Weights of a checkpoint for a model that is not sharded."""

from __future__ import annotations

import warnings
from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from recd_plugins.errors import RecdError
from recd_plugins.training.checkpoint_files.folder import checkpoints_in
from recd_plugins.training.checkpoint_files.metadata import read_metadata
from recd_plugins.training.checkpoint_files.progress import read_progress
from recd_plugins.training.checkpoint_io import SafeLoadPlanner, SafeReader
from recd_plugins.training.checkpoint_state import common_name


def load_weights(folder: Path, model: nn.Module) -> int:
    """Fill a model, whole in this process, from the newest checkpoint of a folder.

    Args:
        folder: ``training.checkpoint.path``.
        model: as the registry makes it, with memory for its tables.

    Returns:
        Optimizer steps done.

    Raises:
        RecdError: there is no checkpoint, or it is of another model.
    """
    found = checkpoints_in(folder)
    if not found:
        raise RecdError(
            f"{folder}: holds no checkpoint; run the registry with training.checkpoint.path first"
        )
    state = model.state_dict()
    document = {"model": {common_name(name): value for name, value in state.items()}}
    try:
        reader = SafeReader(found[-1], read_metadata(found[-1]))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # as is meant
            load(document, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
    except (CheckpointException, RuntimeError, ValueError, TypeError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise RecdError(
            f"{found[-1]}: cannot be loaded into this model ({reason}); take the registry that the "
            "run was started with"
        ) from error
    filled = document["model"]
    model.load_state_dict({name: filled[common_name(name)] for name in state})
    return read_progress(found[-1]).step
