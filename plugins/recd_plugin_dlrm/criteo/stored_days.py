"""A day of Criteo's rows as npy files: the layout of torchrec.datasets.criteo."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_dlrm.criteo.days import (
    COLUMNS,
    DENSE,
    LABEL,
    SPARSE,
    Day,
    RawRows,
    Stretch,
    even_starts,
)
from recd_plugins.api import DataError, Origin, ParquetTable, Piece

# Rows at the beginning and at the end that tell one file from another of its size.
_EDGE = 1024


class NpyDay(Day):
    """Rows of ``NAME_dense.npy``, ``NAME_sparse.npy`` and ``NAME_labels.npy``, memory-mapped.

    Args:
        name: ``day_0``.
        folder: where the files are.
        sparse: the word for ids in the name of their file; ``sparse_contig_freq`` of those that
            torchrec's ``sparse_to_contiguous`` writes.

    Raises:
        DataError: a file is missing, is damaged, or has another shape or type.
    """

    def __init__(self, name: str, folder: Path, sparse: str) -> None:
        self.name = name
        self._path = folder / f"{name}_{sparse}.npy"
        self._sparse = _load(self._path, "iu", len(SPARSE))
        self._dense = _load(folder / f"{name}_dense.npy", "iuf", len(DENSE))
        self._labels = _load(folder / f"{name}_labels.npy", "iufb", 1)
        self.num_rows = len(self._sparse)
        for array, word in ((self._dense, "dense"), (self._labels, "labels")):
            if len(array) != self.num_rows:
                raise DataError(
                    f"{folder / name}_{word}.npy has {len(array)} rows, and {self._path.name} has "
                    f"{self.num_rows}"
                )
        if not self.num_rows:
            raise DataError(f"{self._path}: no rows")
        self.starts = even_starts(self.num_rows)

    def identity(self) -> list[Any]:
        return [self.name, self.num_rows, str(self._sparse.dtype), str(self._dense.dtype)]

    def contents(self) -> dict[str, Any]:
        edges = _edges(self._sparse, self._dense, self._labels)
        return {"rows": self.identity(), "edges": edges}

    def provenance(self) -> list[Any]:
        # Ids may be in several files of as many rows, by option npy_sparse.
        return [*self.identity(), self._path.name, _edges(self._sparse)]

    def read(
        self, stretches: Iterable[Stretch]
    ) -> Generator[tuple[RawRows, tuple[Origin, ...]], None, None]:
        for stretch in stretches:
            rows = slice(stretch.first_row, stretch.first_row + stretch.num_rows)
            labels = self._labels[rows].reshape(-1)
            if len(wrong := np.flatnonzero((labels != 0) & (labels != 1))):
                raise DataError(
                    f"{self._path.with_name(self.name)}_labels.npy: row "
                    f"{stretch.first_row + int(wrong[0])}: {labels[wrong[0]]} is neither 0 nor 1"
                )
            dense = np.ascontiguousarray(self._dense[rows].T)
            if dense.dtype.kind != "f":
                dense = dense.astype(np.int64)
            yield (
                RawRows(labels.astype(np.int8), list(dense), list(_ids(self._sparse[rows]))),
                (Origin(str(self._path), stretch.first_row, stretch.num_rows),),
            )


def _ids(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Ids column by column. Of 32 bits they are unsigned, whatever the file calls them."""
    columns = np.ascontiguousarray(rows.T)
    if columns.dtype == np.int32:
        columns = columns.view(np.uint32)
    return columns.astype(np.int64, copy=False)


def _edges(*arrays: NDArray[Any]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(array[:_EDGE].tobytes() + array[-_EDGE:].tobytes())
    return found.hexdigest()


def _load(path: Path, kinds: str, width: int) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # of a damaged header, whatever numpy's parser of it raises
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path}: cannot be read ({reason})") from error
    shapes = [(width,), ()] if width == 1 else [(width,)]
    if array.ndim == 0 or array.shape[1:] not in shapes or array.dtype.kind not in kinds:
        raise DataError(
            f"{path} is {array.dtype} of shape {list(array.shape)}, not "
            f"{'numbers' if 'f' in kinds else 'integers'} of shape [rows, {width}]"
        )
    return array


#: What files are written with.
SCHEMA = pa.schema(
    [
        pa.field(LABEL, pa.int8(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in (*DENSE, *SPARSE)),
    ]
)


class ParquetDay(Day):
    """Rows of a Parquet file, or of all in a folder.

    Raises:
        DataError: a column is missing or of the wrong type, or there are no rows.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._table = ParquetTable(path)
        self._schema = _columns(self._table)
        units = self._table.units
        self.num_rows = sum(unit.num_rows for unit in units)
        if not self.num_rows:
            raise DataError(f"{path}: no rows")
        starts = list(accumulate((unit.num_rows for unit in units), initial=0))[:-1]
        self.starts = np.array(starts, np.int64)

    def identity(self) -> list[Any]:
        return [self.name, *self._table.identity()]

    def contents(self) -> dict[str, Any]:
        return self._table.contents()

    def read(
        self, stretches: Iterable[Stretch]
    ) -> Generator[tuple[RawRows, tuple[Origin, ...]], None, None]:
        for rows in self._table.read(self._pieces(stretches), self._schema):
            data = rows.data
            for name in COLUMNS:
                if data.column(name).null_count:
                    path, row = rows.origin_of(0)
                    raise DataError(f"{path}: column {name} has a null in row {row} or after it")
            labels = data.column(LABEL).to_numpy()
            if len(wrong := np.flatnonzero((labels != 0) & (labels != 1))):
                path, row = rows.origin_of(int(wrong[0]))
                raise DataError(
                    f"{path}: row {row}, column {LABEL}: {labels[wrong[0]]} is neither 0 nor 1"
                )
            yield (
                RawRows(
                    labels,
                    [data.column(name).to_numpy() for name in DENSE],
                    [data.column(name).to_numpy() for name in SPARSE],
                ),
                rows.origins,
            )

    def _pieces(self, stretches: Iterable[Stretch]) -> Iterator[Piece]:
        for stretch in stretches:
            unit = int(np.searchsorted(self.starts, stretch.first_row, "right")) - 1
            skip = stretch.first_row - int(self.starts[unit])
            yield Piece(self._table.units[unit], skip, stretch.num_rows)


def _columns(table: ParquetTable) -> pa.Schema:
    fields = []
    for name in COLUMNS:
        if name not in table.schema.names:
            raise DataError(
                f"{table.files[0]}: no column {name}; columns are {LABEL}, {DENSE[0]} to "
                f"{DENSE[-1]} and {SPARSE[0]} to {SPARSE[-1]}, as `recd criteo convert` writes them"
            )
        kind = table.schema.field(name).type
        is_float = pt.is_float32(kind) and name in DENSE
        if not (pt.is_integer(kind) or is_float):
            raise DataError(f"{table.files[0]}: column {name} is {kind}, not whole numbers")
        wanted = pa.int8() if name == LABEL else pa.float32() if is_float else pa.int64()
        fields.append(pa.field(name, wanted))
    return pa.schema(fields)
