"""Files of a checkpoint that have arrays: archives of numpy's, without pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from recd_plugins.training.checkpoint_files.errors import DamagedError
from recd_plugins.training.checkpoint_files.manifest import (
    FileDigest,
    check_file,
    digest_of,
)

#: What preprocessing was fitted to be.
FITTED = "preprocessing.npz"
#: What each rank has of its own.
RANKS = "ranks.npz"


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> FileDigest:
    """Write a file; the digest is for the manifest."""
    with zipfile.ZipFile(path, "w") as archive:
        for number, (name, array) in enumerate(arrays.items()):
            # The name is a comment: names of files have other rules.
            entry = zipfile.ZipInfo(f"{number}.npy")
            entry.comment = name.encode()
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array, order="C"), allow_pickle=False)
    return digest_of(path)


def read_arrays(checkpoint: Path, name: str) -> dict[str, np.ndarray]:
    """What a file of a checkpoint has, by name; nothing where there is none.

    Raises:
        DamagedError: the file is not as it was written.
        RecdError: as ``read_manifest``.
    """
    if not check_file(checkpoint, name):
        return {}
    try:
        with zipfile.ZipFile(checkpoint / name) as archive:
            return {entry.comment.decode(): _array(archive, entry) for entry in archive.infolist()}
    except (ValueError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{checkpoint / name}: is no archive of arrays ({error})") from error


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return array
