"""How many distinct ids of a table a batch has: what coalescing sends."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import torch
from torch import Tensor

from recd_plugins.data.row_pipeline import RowPipeline
from recd_plugins.data.transforms import Transforms
from recd_plugins.interfaces import Rows, Table
from recd_plugins.registry import Registry
from recd_plugins.values.batch import Batch
from recd_plugins.values.data_profile import DistinctIds
from recd_plugins.values.rows import Origin

# A batch is halved so often, to see how its distinct ids grow.
_HALVINGS = 4


def measure_distinct(
    registry: Registry,
    transforms: Transforms,
    rows: Rows,
    batch: Batch,
    tables: Sequence[Table],
) -> dict[str, DistinctIds]:
    """The distinct ids of each of ``tables`` in a batch, by table name.

    Args:
        registry: whose dataset the rows are of.
        transforms: that made ``batch`` of them.
        rows: of the batch.
        batch: what they become.
        tables: whose features the batch has.
    """
    if not tables:
        return {}
    sizes = sorted({max(1, len(rows) >> halvings) for halvings in range(_HALVINGS + 1)})

    def of_parts(size: int) -> list[dict[str, Tensor]]:
        """The rows as batches of ``size``, ids by feature."""
        if size == len(rows):
            return [_ids(batch)]
        pipeline = RowPipeline(registry.with_training({"batch_size": size}), transforms)
        return [
            _ids(pipeline.batch(Rows(rows.data.slice(start, size), _behind(rows.origins, start))))
            for start in range(0, len(rows) - size + 1, size)
        ]

    parts = [of_parts(size) for size in sizes]
    return {
        table.name: DistinctIds(
            tuple(sizes),
            tuple(mean(_distinct(ids, table) for ids in of_size) for of_size in parts),
        )
        for table in tables
    }


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
