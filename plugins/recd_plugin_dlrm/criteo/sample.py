"""Writes small files in Criteo's format, with Zipf-distributed ids and learnable labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from recd_plugin_dlrm.criteo.days import COLUMNS, DENSE, RawRows
from recd_plugin_dlrm.criteo.tsv import compression_of
from recd_plugins.api import DataError, file_utils

#: Maximum number of ids per feature, drawn from Zipf's law with exponent 1.1.
_IDS = (100, 50, 2000, 1000, 30, 10, 400, 40, 3, 1000) * 2 + (500, 2000, 12, 200, 15, 25)
_MISSING_DENSE, _MISSING_SPARSE = 0.2, 0.1
# The features that determine the label, and their weights.
_TELLING = (0, 2, 5, 9, 13)
_EFFECT = 1.5
_ROWS_AT_ONCE = 65_536


def write_sample(
    folder: Path,
    kind: str,
    file_format: str,
    rows: int,
    days: int,
    seed: int,
    progress: Callable[[int], None],
) -> list[Path]:
    """Write files ``day_0``, ``day_1``, ... with ``rows`` rows each, and return their paths.

    For kind ``kaggle``, writes a single ``train.txt`` instead.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder}: the folder is not empty. Use another folder.")
    if kind == "kaggle":
        parts, suffix = {"train": rows * days}, ".txt"
    else:
        parts, suffix = {f"day_{day}": rows for day in range(days)}, ""
    files = []
    for number, (name, num_rows) in enumerate(parts.items()):
        sampler = Sampler(np.random.default_rng([seed, number]))
        if file_format == "npy":
            files += write_npy(folder, name, sampler.rows(num_rows))
            progress(num_rows)
        else:
            end = "" if file_format == "tsv" else f".{file_format}"
            files.append(folder / f"{name}{suffix}{end}")
            write_tsv(files[-1], _pieces(sampler, num_rows, progress))
    return files


def _pieces(sampler: Sampler, num_rows: int, progress: Callable[[int], None]) -> Iterator[RawRows]:
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, num_rows - first)
        yield sampler.rows(rows)
        progress(rows)


class Sampler:
    """Draws synthetic Criteo rows. Each id has the same effect on labels for every seed."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        fixed = np.random.default_rng(0)
        # Ids look like Criteo's: unordered 32-bit numbers. 0 is excluded; it means a missing id.
        self._ids = [fixed.integers(1, 1 << 32, size) for size in _IDS]
        self._effects = [fixed.normal(0, _EFFECT, size) for size in _IDS]
        self._shares = [_zipf(size) for size in _IDS]

    def rows(self, num_rows: int) -> RawRows:
        """Draw ``num_rows`` new rows."""
        random = self._random
        logits = np.full(num_rows, -1.2)
        sparse: list[NDArray[np.int64]] = []
        for feature, (ids, shares) in enumerate(zip(self._ids, self._shares, strict=True)):
            chosen = random.choice(len(ids), num_rows, p=shares)
            is_missing = random.random(num_rows) < _MISSING_SPARSE
            if feature in _TELLING:
                logits += np.where(is_missing, 0, self._effects[feature][chosen])
            sparse.append(np.where(is_missing, 0, ids[chosen]))
        dense = []
        for column in range(len(DENSE)):
            values = np.floor(random.lognormal(1.5, 1.5, num_rows)).astype(np.int64)
            # One column has negative numbers, like the second column of Criteo's data.
            values -= 2 * (column == 1)
            if column == 0:
                logits += np.log1p(values) - 1.5
            dense.append(np.where(random.random(num_rows) < _MISSING_DENSE, 0, values))
        labels = random.random(num_rows) < 1 / (1 + np.exp(-logits))
        return RawRows(labels.astype(np.int8), dense, sparse)


def write_tsv(path: Path, pieces: Iterable[RawRows]) -> None:
    """Write rows as TSV, compressed according to the suffix. Some zeros become empty fields."""
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with (
        file_utils.new_file(path) as temporary,
        pa.output_stream(str(temporary), compression=compression_of(path)) as sink,
    ):
        for rows in pieces:
            even = np.arange(len(rows)) % 2 == 0
            dense = [pa.array(values, mask=(values == 0) & even) for values in rows.dense]
            columns = [pa.array(rows.labels), *dense, *map(_hex, rows.sparse)]
            pa.csv.write_csv(pa.table(columns, COLUMNS), sink, options)


def write_npy(folder: Path, name: str, rows: RawRows) -> list[Path]:
    """Write the dense, label and sparse npy files of a day, with dense features as integers."""
    arrays: dict[str, NDArray[Any]] = {
        "dense": np.stack(rows.dense, axis=1).astype(np.int32),
        "sparse": np.stack(rows.sparse, axis=1),
        "labels": rows.labels.astype(np.int32)[:, None],
    }
    files = []
    for word, array in arrays.items():
        files.append(folder / f"{name}_{word}.npy")
        with file_utils.new_file(files[-1]) as temporary, temporary.open("wb") as stream:
            np.save(stream, array)
    return files


def _hex(ids: NDArray[np.int64]) -> pa.Array:
    distinct, codes = np.unique(ids, return_inverse=True)
    words = pa.array(["" if value == 0 else f"{value:08x}" for value in distinct.tolist()])
    return words.take(pa.array(codes))


def _zipf(size: int) -> NDArray[np.float64]:
    shares = np.arange(1, size + 1) ** -1.1
    return shares / shares.sum()
