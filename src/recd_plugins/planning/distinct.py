"""How many distinct ids of a table a batch has: what coalescing sends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import mean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recd_plugins.data.row_pipeline import RowPipeline
from recd_plugins.data.sent_reads import sent_reads
from recd_plugins.data.transforms import Transforms
from recd_plugins.interfaces import Rows, Table
from recd_plugins.registry import Registry
from recd_plugins.registry.no_data import NoDataset
from recd_plugins.values.batch import Batch
from recd_plugins.values.data_profile import DistinctIds
from recd_plugins.values.rows import Origin

# A batch is halved so often, to see how its distinct ids grow.
_HALVINGS = 4
# So many batches are counted, one by one and several together, to see the same.
_BATCHES, _TOGETHER = 32, (1, 2, 4)


def measure_distinct(
    registry: Registry,
    transforms: Transforms,
    rows: Rows,
    batches: Sequence[Batch],
    tables: Sequence[Table],
) -> dict[str, DistinctIds]:
    """The distinct ids of each of ``tables`` in a batch, the mean of some, by table name.

    How they grow with the batch size is looked at in the first.

    Args:
        registry: whose dataset the rows are of.
        transforms: that made ``batches`` of them.
        rows: of the first batch.
        batches: of as many rows each.
        tables: whose features the batches have.
    """
    if not tables:
        return {}
    sizes = sorted({max(1, len(rows) >> halvings) for halvings in range(_HALVINGS + 1)})

    def of_parts(size: int) -> list[dict[str, Tensor]]:
        """The rows as batches of ``size``, ids by feature."""
        if size == len(rows):
            return [_ids(batches[0])]
        pipeline = RowPipeline(registry.with_training({"batch_size": size}), transforms)
        return [
            _ids(pipeline.batch(Rows(rows.data.slice(start, size), _behind(rows.origins, start))))
            for start in range(0, len(rows) - size + 1, size)
        ]

    parts = [of_parts(size) for size in sizes]
    whole = [_ids(batch) for batch in batches]
    found = {}
    for table in tables:
        in_first = [mean(_distinct(ids, table) for ids in of_size) for of_size in parts]
        growth = mean(_distinct(ids, table) for ids in whole) / in_first[-1] if in_first[-1] else 1
        found[table.name] = DistinctIds(tuple(sizes), tuple(growth * ids for ids in in_first))
    return found


def distinct_reads(registry: Registry, tables: Sequence[Table]) -> dict[str, DistinctIds]:
    """The distinct ids of each of ``tables`` in a batch as it is sent, by table name.

    The mean of the first batches, of which one alone may have few sessions. None without data.

    Args:
        registry: its dataset, converter, preprocessing and batch size.
        tables: with their features.
    """
    if isinstance(registry.dataset, NoDataset):
        return {}
    size = registry.training.batch_size
    found: dict[str, list[NDArray[np.int64]]] = {table.name: [] for table in tables}
    for reads in islice(sent_reads(registry, tables, None), _BATCHES):
        for name, ids in reads.ids.items():
            found[name].append(np.unique(np.concatenate(ids)))
    return {
        name: DistinctIds(
            tuple(size * together for together in _TOGETHER if len(batches) >= together),
            tuple(
                _mean_distinct(batches, together)
                for together in _TOGETHER
                if len(batches) >= together
            ),
        )
        for name, batches in found.items()
    }


def _mean_distinct(batches: Sequence[NDArray[np.int64]], together: int) -> float:
    """Of so many adjacent batches as if they were one."""
    starts = range(0, len(batches) - together + 1, together)
    return mean(
        len(np.unique(np.concatenate(batches[start : start + together]))) for start in starts
    )


def _behind(origins: Sequence[Origin], row: int) -> tuple[Origin, ...]:
    """Where the rows from ``row`` on came from."""
    for number, origin in enumerate(origins):
        if row < origin.num_rows:
            return (origin.slice(row, origin.num_rows - row), *origins[number + 1 :])
        row -= origin.num_rows
    return ()


def _ids(batch: Batch) -> dict[str, Tensor]:
    """By feature; ids that are stored once for several rows as often as they are stored."""
    found = {} if batch.kjt is None else {n: j.values() for n, j in batch.kjt.to_dict().items()}
    for ikjt in batch.ikjts:
        found |= {n: j.values() for n, j in ikjt.to_unique_kjt().to_dict().items()}
    for partial in batch.partials:
        found |= {name: values for name, values, _, _ in partial.split()}
    return found


def _distinct(ids: dict[str, Tensor], table: Table) -> int:
    given = [ids[name] for name in table.features if name in ids]
    return len(torch.unique(torch.cat(given))) if given else 0
