"""Random numbers of rows: the same wherever, whenever and next to whatever a row is read."""

from __future__ import annotations

from itertools import takewhile
from pathlib import PurePath
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from recd_plugins.api import Rows

Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def row_keys(rows: Rows, seed: int, epoch: int) -> Keys:
    """A key of each row in an epoch, of its file (``_name``) and its row there, ``[num_rows]``."""
    numbers = [
        np.arange(origin.first_row, origin.first_row + origin.num_rows)
        if origin.rows is None
        else origin.rows.to_numpy()
        for origin in rows.origins
    ]
    files = [crc32(_name(origin.path).encode()) for origin in rows.origins]
    counts = [origin.num_rows for origin in rows.origins]
    keys = _mixed(np.concatenate(numbers).astype(np.uint64))
    keys = _mixed(keys ^ np.repeat(np.array(files, np.uint64), counts))
    of_epoch = _mixed(np.array([seed], np.uint64)) ^ np.array([epoch], np.uint64)
    return _mixed(keys ^ _mixed(of_epoch))


def unit_floats(keys: Keys, number: NDArray[np.int64]) -> NDArray[np.float64]:
    """The random number ``number`` of each key, in [0, 1); the two are broadcast."""
    mixed = _mixed(keys + _GOLDEN * (number.astype(np.uint64) + np.uint64(1)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _name(path: str) -> str:
    """Of a file wherever its table lies; with its partition, as many have a part-0.parquet."""
    name, *folders = reversed(PurePath(path).parts)
    partition = takewhile(lambda folder: "=" in folder, folders)
    return "/".join([name, *partition])


def _mixed(values: Keys) -> Keys:
    """Each to another one, whose bits look independent of its (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
