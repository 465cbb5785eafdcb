"""Weights of a checkpoint in one piece, without ranks: whatever sharding wrote them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load

from recd_plugins.errors import RecdError
from recd_plugins.model_tables import embedding_modules
from recd_plugins.training.checkpoint_files.errors import damaged
from recd_plugins.training.checkpoint_files.former_names import as_named_now
from recd_plugins.training.checkpoint_files.manifest import problems
from recd_plugins.training.checkpoint_files.metadata import read_metadata
from recd_plugins.training.checkpoint_files.tables import table_entry
from recd_plugins.training.checkpoint_io import SafeLoadPlanner, SafeReader

_MODEL = "model."


class _SomeWeights(SafeLoadPlanner):
    """For some entries of a checkpoint."""

    def create_local_plan(self) -> Any:
        """As DCP's: what is not asked for is left out."""
        return super(SafeLoadPlanner, self).create_local_plan()


def check_whole(checkpoint: Path) -> None:
    """Refuse a checkpoint that is not as it was written; every file is read.

    Raises:
        DamagedError: says what is wrong.
    """
    if damage := problems(checkpoint)[0]:
        raise damaged(damage)


def read_weights(
    checkpoint: Path, wanted: Callable[[str], bool] = lambda _: True, model: Collection[str] = ()
) -> dict[str, Tensor]:
    """Parameters and buffers of the model by name.

    Args:
        checkpoint: that is whole.
        wanted: which, by name.
        model: names of the parameters that it has, which those of a checkpoint of an earlier
            version get.

    Raises:
        DamagedError: the checkpoint is damaged.
    """
    contents = as_named_now(read_metadata(checkpoint), lambda: model)
    weights = {
        name.removeprefix(_MODEL): torch.empty(entry.size, dtype=getattr(torch, entry.dtype))
        for name, entry in contents.entries.items()
        if entry is not None and name.startswith(_MODEL) and wanted(name.removeprefix(_MODEL))
    }
    document = {"model": weights}
    reader = SafeReader(checkpoint, contents)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(document, storage_reader=reader, planner=_SomeWeights(), no_dist=True)
    return weights


def table_weights(checkpoint: Path, table: str) -> Tensor:
    """The rows of an embedding table, ``[num_embeddings, embedding_dim]``.

    Raises:
        RecdError: the checkpoint is damaged, or has no such table; names those that it has.
    """
    wanted = table_entry(checkpoint, table)
    check_whole(checkpoint)
    return read_weights(checkpoint, lambda name: name == wanted)[wanted]


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint into a model in one piece.

    Tensors that a sharding's modules keep beside the tables are left out: they hold no weights.

    Raises:
        RecdError: the model has other parameters; names one.
    """
    own = model.state_dict()
    weights = read_weights(checkpoint, model=own)
    kept = tuple(f"{module.path}." for module in embedding_modules(model) if module.path)
    for name in own.keys() ^ weights.keys():
        if name not in own and name.startswith(kept):
            continue
        raise RecdError(
            f"{checkpoint}: {name} is {'not ' if name in own else ''}there, and the model of the "
            f"registry has {'it' if name in own else 'no such parameter'}; take the registry that "
            "it was trained by"
        )
    model.load_state_dict({name: weights[name] for name in own})
