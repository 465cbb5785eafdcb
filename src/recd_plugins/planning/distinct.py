"""What batches read of tables: how many distinct ids, and of which rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from statistics import mean

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recd_plugins.data.access import sent_reads
from recd_plugins.interfaces import Table
from recd_plugins.registry import RunConfig
from recd_plugins.registry.run_config import NoDataset
from recd_plugins.sparse.index_select import jagged_index_select
from recd_plugins.values.batch import Batch
from recd_plugins.values.data_profile import DistinctIds, Spread

# A batch is halved so often, to see how its distinct ids grow.
_HALVINGS = 4
# So many batches are counted, one by one and several together, to see the same.
_BATCHES, _TOGETHER = 32, (1, 2, 4)
# Equal parts of a table's rows in which reads are counted.
_PARTS = 256


def measure_reads(
    batches: Sequence[Batch], tables: Sequence[Table], of_rows_alone: Collection[str]
) -> tuple[dict[str, DistinctIds], dict[str, Spread]]:
    """The distinct ids of each of ``tables`` in a batch, the mean of some, by table name.

    How they grow with the batch size is looked at in the first, where it has some. And how reads
    are spread over rows, of tables that are read and whose features have rows for ids.

    Args:
        batches: of as many rows each.
        tables: whose features the batches have.
        of_rows_alone: features whose ids are rows of their tables, and were checked; others may be
            mapped to rows later.
    """
    if not tables:
        return {}, {}
    num_rows = batches[0].batch_size
    sizes = sorted({max(1, num_rows >> halvings) for halvings in range(_HALVINGS + 1)})
    of_rows = _every_row(batches[0])
    whole = [_ids(batch) for batch in batches]
    found, spread = {}, {}
    for table in tables:
        rows = [of_rows[name] for name in table.features if name in of_rows]
        in_first = [mean(_distinct_in_parts(rows, num_rows, size)) for size in sizes]
        given = [_of_table(ids, table) for ids in whole]
        distinct = [_distinct_ids([ids]) for ids in given]
        of_whole = mean(map(len, distinct))
        if in_first[-1]:
            ids = tuple(of_whole / in_first[-1] * ids for ids in in_first)
            found[table.name] = DistinctIds(tuple(sizes), ids)
        else:  # of the first, which has none, nobody can tell how they grow
            found[table.name] = DistinctIds((num_rows,), (of_whole,))
        if any(map(len, given)) and set(table.features) <= set(of_rows_alone):
            spread[table.name] = Spread(_spread(given, table), _spread(distinct, table))
    return found, spread


def _spread(batches: Sequence[NDArray[np.int64]], table: Table) -> tuple[float, ...]:
    counts = np.zeros(_PARTS)
    for ids in batches:
        counts += np.bincount(ids * _PARTS // table.num_embeddings, minlength=_PARTS)
    return tuple((np.cumsum(counts) / counts.sum()).tolist())


def _distinct_in_parts(
    features: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], num_rows: int, size: int
) -> list[int]:
    """Distinct ids of the rows as batches of ``size``, whatever a converter makes of these."""
    return [
        len(_distinct_ids([ids[at[start] : at[start + size]] for ids, at in features]))
        if features
        else 0
        for start in range(0, num_rows - size + 1, size)
    ]


def _every_row(batch: Batch) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Ids of all rows, and where each row begins, by feature."""
    found = {} if batch.kjt is None else batch.kjt.to_dict()
    exact = [
        ikjt
        for partial in batch.partials
        for ikjt in partial.to_ikjt([[key] for key in partial.keys()])  # noqa: SIM118
    ]
    for ikjt in (*batch.ikjts, *exact):
        inverse = ikjt.inverse_lookup().long()
        for name, jagged in ikjt.to_unique_kjt().to_dict().items():
            found[name] = jagged_index_select(jagged, inverse)
    return {name: (j.values().numpy(), j.offsets().numpy()) for name, j in found.items()}


def distinct_reads(registry: RunConfig, tables: Sequence[Table]) -> dict[str, DistinctIds]:
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
            found[name].append(_distinct_ids(ids))
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
    return mean(len(_distinct_ids(batches[start : start + together])) for start in starts)


def _ids(batch: Batch) -> dict[str, Tensor]:
    """By feature; ids that are stored once for several rows as often as they are stored."""
    found = {} if batch.kjt is None else {n: j.values() for n, j in batch.kjt.to_dict().items()}
    for ikjt in batch.ikjts:
        found |= {n: j.values() for n, j in ikjt.to_unique_kjt().to_dict().items()}
    for partial in batch.partials:
        found |= {name: values for name, values, _, _ in partial.split()}
    return found


def _of_table(ids: dict[str, Tensor], table: Table) -> NDArray[np.int64]:
    given = [ids[name].numpy() for name in table.features if name in ids]
    return np.concatenate([np.empty(0, np.int64), *given])


def _distinct_ids(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Each id once, sorted; the hash table of ``np.unique`` takes more than ten times as long."""
    ids = np.sort(np.concatenate(parts))
    first = np.ones(len(ids), np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    return ids[first]
