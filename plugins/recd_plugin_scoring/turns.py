"""Every row of a table in stored order, dealt to ranks in batches of one size, to be scored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa

from recd_plugins.api import Rows
from recd_plugins.api.reading import concat_rows, rebatch, slice_rows


@dataclass(frozen=True)
class Turn:
    """One step of all ranks.

    Attributes:
        rows: the batch of this rank, filled up with a row that is there.
        counts: how many rows of each rank's batch count, the first ones, in the order of ranks.
        keys: the key columns of those rows, rank after rank; none but on rank 0.
    """

    rows: Rows
    counts: tuple[int, ...]
    keys: tuple[pa.RecordBatch, ...]


def turns(
    scanned: Iterable[Rows], keys: tuple[str, ...], rank: int, world_size: int, batch_size: int
) -> Iterator[Turn]:
    """The rows of a scan: the batches of a turn follow each other, and so do turns.

    Every rank reads everything, and makes model inputs of its own share alone.
    """
    batches = rebatch(scanned, batch_size, rest=True)
    while dealt := list(islice(batches, world_size)):
        counts = tuple(len(each) for each in dealt) + (0,) * (world_size - len(dealt))
        mine = dealt[rank] if rank < len(dealt) else slice_rows(dealt[-1], 0, 1)
        last = slice_rows(mine, len(mine) - 1, 1)
        yield Turn(
            concat_rows([mine, *[last] * (batch_size - len(mine))]),
            counts,
            tuple(each.data.select(list(keys)) for each in dealt) if rank == 0 else (),
        )
