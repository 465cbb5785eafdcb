"""Rows of several batches, from which batches can be taken in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugins.data.list_dict import concat_batches
from recd_plugins.values.rows import Origin, Rows


class RowTable:
    """Rows in one piece, with their origins.

    Args:
        parts: of one schema, at least one.
    """

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._data = concat_batches([part.data for part in parts])
        origins = [origin for part in parts for origin in part.origins]
        numbers: dict[str, int] = {}
        self._files = np.array([numbers.setdefault(o.path, len(numbers)) for o in origins])
        self._paths = list(numbers)
        self._named = {origin.path: origin.named for origin in origins}
        self._file_rows = np.concatenate([_file_rows(origin) for origin in origins])
        self._starts = np.array(list(accumulate((o.num_rows for o in origins), initial=0))[:-1])

    def __len__(self) -> int:
        return int(self._data.num_rows)

    def take(self, rows: NDArray[np.int64], groups: Mapping[str, int]) -> Rows:
        """Rows by their numbers, int64 ``[num_rows]``, as a batch of its own; see ``Rows.groups``.

        Of a dictionary it keeps what these rows use.
        """
        indices = pa.array(rows)
        columns = [
            _take_dictionary(column, rows)
            if pt.is_dictionary(column.type)
            else column.take(indices)
            for column in self._data.columns
        ]
        data = pa.record_batch(columns, schema=self._data.schema)
        return Rows(data, self._origins(rows), groups)

    def _origins(self, rows: NDArray[np.int64]) -> tuple[Origin, ...]:
        """Where rows came from, those that are adjacent in a file as one."""
        origin = np.searchsorted(self._starts, rows, "right") - 1
        files = self._files[origin]
        file_rows = self._file_rows[rows]
        breaks = (np.diff(files) != 0) | (np.diff(file_rows) != 1)
        firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        lengths = np.diff(firsts, append=len(rows))
        return tuple(
            Origin(path := self._paths[file], first, length, named=self._named[path])
            for file, first, length in zip(
                files[firsts].tolist(), file_rows[firsts].tolist(), lengths.tolist(), strict=True
            )
        )


def _file_rows(origin: Origin) -> NDArray[np.int64]:
    if origin.rows is not None:
        return np.asarray(origin.rows)
    return np.arange(origin.first_row, origin.first_row + origin.num_rows)


def _take_dictionary(column: pa.DictionaryArray, rows: NDArray[np.int64]) -> pa.Array:
    if column.null_count:
        return column.take(pa.array(rows))
    used, codes = np.unique(column.indices.to_numpy()[rows], return_inverse=True)
    return pa.DictionaryArray.from_arrays(
        pa.array(codes.astype(np.int32)), column.dictionary.take(pa.array(used)), safe=False
    )
