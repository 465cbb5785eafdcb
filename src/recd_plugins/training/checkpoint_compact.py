"""Replaces a delta checkpoint by an equal full one."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from recd_plugins.runtime.errors import RecdError
from recd_plugins.training.checkpoint_dcp import (
    SafeLoadPlanner,
    SafeReader,
    TellingWriter,
    read_metadata,
)
from recd_plugins.training.checkpoint_files import (
    MANIFEST,
    METADATA,
    check_whole,
    checkpoints_in,
    digest_of,
    hidden,
    manifest_text,
    put,
    read_delta,
    read_manifest,
    sync,
)
from recd_plugins.training.checkpoint_rows import read_rows


def compact(checkpoint: Path) -> bool:
    """Replace a delta by a full checkpoint of the same state, which needs no other checkpoints.

    All tables must fit into memory. Return False if the checkpoint is already full.

    Raises:
        RecdError: the checkpoint is damaged, or a later delta needs it as it is.
    """
    for later in checkpoints_in(checkpoint.parent):
        if (delta := read_delta(later)) is not None and delta.base == checkpoint.name:
            raise RecdError(
                f"{checkpoint}: {later.name} needs this checkpoint unchanged. Compact the newest "
                "checkpoint."
            )
    if read_delta(checkpoint) is None:
        return False
    check_whole(checkpoint)
    partial = hidden(checkpoint, "partial")
    partial.mkdir()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            save(_read(checkpoint), storage_writer=TellingWriter(partial), no_dist=True)
        for name in read_manifest(checkpoint):
            if not name.startswith((METADATA, "__", "rows-")):  # of DCP, and changed rows
                shutil.copyfile(checkpoint / name, partial / name)
        files = {path.name: digest_of(path) for path in partial.iterdir()}
        (partial / MANIFEST).write_text(manifest_text(files), encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            sync(path)
        put(partial, checkpoint)
    except (CheckpointException, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise RecdError(
            f"{checkpoint}: the full checkpoint cannot be written ({reason}). The delta is "
            "unchanged. Fix the cause, and run the command again."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _read(checkpoint: Path) -> dict[str, Any]:
    """Return all unsharded tensors and values of a checkpoint by name."""
    metadata = read_metadata(checkpoint)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    reader, planner = SafeReader(checkpoint, metadata), SafeLoadPlanner(partial=True)
    load(state, storage_reader=reader, planner=planner, no_dist=True)
    read_rows(checkpoint, state)
    return state
