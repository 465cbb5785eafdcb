"""Functions that slice, concatenate and select rows, or read all rows of a split."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate, islice
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugins.data.list_dict import concat_batches
from recd_plugins.interfaces import Dataset, Split
from recd_plugins.interfaces.plugin import plugin_items
from recd_plugins.interfaces.rows import Origin, Rows
from recd_plugins.runtime.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from recd_plugins.config.run_config import RunConfig

# Factor by which batch sizes shrink at the end of a split.
_FINER = 8


def rebatch(parts: Iterable[Rows], size: int, *, rest: bool = False) -> Iterator[Rows]:
    """Yield the rows in batches of ``size`` rows, and with ``rest`` a smaller last batch.

    Does not copy a batch within one part. Parts may have any size.
    """
    waiting: list[Rows] = []
    missing = size
    for part in parts:
        start = 0
        while start < len(part):
            taken = slice_rows(part, start, min(missing, len(part) - start))
            waiting.append(taken)
            start += len(taken)
            missing -= len(taken)
            if missing == 0:
                yield concat_rows(waiting)
                waiting, missing = [], size
    if rest and waiting:
        yield concat_rows(waiting)


def slice_rows(rows: Rows, start: int, length: int) -> Rows:
    """Return ``length`` rows, starting at row ``start``."""
    origins, before = [], 0
    for origin in rows.origins:
        first, last = max(start, before), min(start + length, before + origin.num_rows)
        if first < last:
            origins.append(origin.slice(first - before, last - first))
        before += origin.num_rows
    return Rows(rows.data.slice(start, length), tuple(origins))


def concat_rows(parts: list[Rows]) -> Rows:
    """Concatenate several ``Rows`` to one."""
    if len(parts) == 1:
        return parts[0]
    batch = concat_batches([part.data for part in parts])
    return Rows(batch, tuple(origin for part in parts for origin in part.origins))


class RowTable:
    """Rows in memory, with selection by index. All ``parts`` have the same schema."""

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

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """Return the rows at the given indices, int64 ``[num_rows]``.

        Arrow dictionaries in the result contain only values of these rows.
        """
        indices = pa.array(rows)
        columns = [
            _take_dictionary(column, rows)
            if pt.is_dictionary(column.type)
            else column.take(indices)
            for column in self._data.columns
        ]
        data = pa.record_batch(columns, schema=self._data.schema)
        return Rows(data, self._origins(rows))

    def _origins(self, rows: NDArray[np.int64]) -> tuple[Origin, ...]:
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


def rows_of_split(dataset: Dataset, split: Split, batch_size: int = 8192) -> Iterator[Rows]:
    """Yield every row of a split once, in stored order.

    Batches have at most ``batch_size`` rows if the dataset cannot ``scan``.
    """
    if dataset.session_keys() is not None:
        yield from plugin_items(dataset, "scan", dataset.scan(split))
        return
    num_rows = len(dataset.reader(rank=0, world_size=1, batch_size=1, split=split))
    read, size = 0, max(1, min(batch_size, num_rows))
    while read < num_rows:
        reader = dataset.reader(rank=0, world_size=1, batch_size=size, split=split)
        if read:
            reader.skip(read // size)
        yield from islice(reader, (num_rows - read) // size)
        read = num_rows // size * size
        size = size // _FINER if size % _FINER == 0 else 1


def training_rows(registry: RunConfig, limit: int | None) -> Iterator[Rows]:
    """Yield the first ``limit`` training rows (of a stream: of a sample), without wrappers."""
    dataset, left = registry.dataset, sys.maxsize if limit is None else limit
    if dataset.is_stream and limit is None:
        raise DataError(
            f"dataset {dataset.name!r} is a stream, so its rows cannot all be read before "
            "training. Remove plugins that read all training rows, such as vocabularies"
        )
    size = registry.training.batch_size
    stream = dataset.is_stream
    batches = iter(dataset.sample(size)) if stream else rows_of_split(dataset, "train", size)
    for rows in plugin_items(dataset, "reader", batches):
        if len(rows):
            yield slice_rows(rows, 0, min(left, len(rows)))
        left -= len(rows)
        if left <= 0:
            return


def session_ids(rows: Rows, column: str) -> Tensor:
    """Return the session id of each row, int64 ``[len(rows)]``. Hashes other types to int64."""
    import torch

    from recd_plugins.data.arrow import column_without_nulls

    sessions = column_without_nulls(rows, column)
    if pt.is_integer(sessions.type):
        return torch.from_numpy(sessions.cast(pa.int64(), safe=False).to_numpy().copy())
    if not pt.is_dictionary(sessions.type):
        sessions = sessions.dictionary_encode()
    hashed = torch.tensor([_hash(value) for value in sessions.dictionary.to_pylist()])
    return hashed[torch.from_numpy(sessions.indices.cast(pa.int64()).to_numpy().copy())]


def _hash(value: object) -> int:
    content = value if isinstance(value, bytes) else str(value).encode()
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True)
