"""The file of a checkpoint that has what preprocessing was fitted to be."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from recd_plugins.training.checkpoint_files.errors import DamagedError
from recd_plugins.training.checkpoint_files.manifest import differing, misfits, read_manifest

#: An archive of numpy arrays, without pickle.
FITTED = "preprocessing.npz"


def write_fitted(checkpoint: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the file; its manifest is to have its digest."""
    with zipfile.ZipFile(checkpoint / FITTED, "w") as archive:
        for number, (name, array) in enumerate(arrays.items()):
            # The name is a comment: names of files have other rules.
            entry = zipfile.ZipInfo(f"{number}.npy")
            entry.comment = name.encode()
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def read_fitted(checkpoint: Path) -> dict[str, np.ndarray]:
    """What the file of a checkpoint has; nothing where nothing was fitted.

    Raises:
        DamagedError: the file is not as it was written.
        RecdError: as ``read_manifest``.
    """
    files = read_manifest(checkpoint)
    if FITTED not in files:
        return {}
    mine = {FITTED: files[FITTED]}
    if damage := misfits(checkpoint, mine)[0] or differing(checkpoint, mine):
        raise DamagedError(damage[0])
    try:
        with zipfile.ZipFile(checkpoint / FITTED) as archive:
            return {entry.comment.decode(): _array(archive, entry) for entry in archive.infolist()}
    except (ValueError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{checkpoint / FITTED}: is no archive of arrays ({error})") from error


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return array
