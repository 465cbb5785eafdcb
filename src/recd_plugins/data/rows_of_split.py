"""Every row of a split, of any dataset."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from recd_plugins.interfaces import Dataset, Rows, Split
from recd_plugins.plugin_call import plugin_items

# Of the batches that are left, one in so many rows of those before.
_FINER = 8


def rows_of_split(dataset: Dataset, split: Split, batch_size: int = 8192) -> Iterator[Rows]:
    """Every row of a split once, in stored order, as one process reads them.

    What no batch of ``batch_size`` is left for comes in smaller ones: a reader has whole batches
    alone, and not every dataset can scan.

    Args:
        dataset: with wrappers or without.
        split: of it.
        batch_size: rows of a batch, about; scans have sizes of their own.

    Raises:
        DataError: there is no such split.
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
