"""Access profiles of the tables that a registry's data is looked up in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from recd_plugins.access.counting import TableCounter
from recd_plugins.access.profile import AccessProfile
from recd_plugins.data.training_rows import training_rows
from recd_plugins.errors import DataError
from recd_plugins.plugin_call import plugin_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from recd_plugins.data.sent_reads import Reads
    from recd_plugins.interfaces import Rows, Table
    from recd_plugins.registry import RunConfig

#: Distinct rows that are counted exactly, of all tables together, unless a bound is given.
EXACT_ROWS = 1 << 25
_LEAST_BOUND = 1 << 16


def measure_access(
    registry: RunConfig,
    tables: Sequence[Table],
    *,
    rows: int | None = None,
    bound: int | None = None,
    deduplicated: bool = True,
    progress: Callable[[int], None] | None = None,
) -> AccessProfile:
    """How often the training split reads each row of ``tables``, after preprocessing.

    It streams, and is the same in every process. Of a table with features that the converter
    deduplicates only what is sent counts: the ids of the unique rows of a batch.

    Args:
        registry: its dataset, converter, preprocessing and batch size are used, its model is not.
        tables: with their features; ids of all features of a table are added up.
        rows: read the first so many rows of the training split; None: all. Where something is
            deduplicated, batches are read whole, and rows that do not fill one are left out.
        bound: distinct rows a table that are counted exactly; beyond it a sketch is kept, whose
            error the profile says. None: the tables share ``EXACT_ROWS`` evenly.
        deduplicated: whether deduplication counts; else all rows do, as they are stored.
        progress: told after each batch how many rows it had.

    Raises:
        DataError: the data is missing or wrong, has no rows or lacks a feature, or an id is outside
            its table.
        PluginError: a plugin failed.
        RegistryError: a pattern of preprocessing matches no feature.
    """
    from recd_plugins.data.sent_reads import deduplicated_tables, sent_reads

    _check_features(registry, tables)
    if bound is None:
        bound = max(_LEAST_BOUND, EXACT_ROWS // max(1, len(tables)))
    counters = {table.name: TableCounter(bound) for table in tables}
    every_row = dict.fromkeys(counters, 0)
    shared = deduplicated_tables(registry, tables) if deduplicated else set()
    samples = 0
    for reads in (sent_reads if shared else _stored_reads)(registry, tables, rows):
        for name, ids in reads.ids.items():
            for of_feature in ids:
                counters[name].add(of_feature)
            every_row[name] += reads.every_row[name]
        samples += reads.samples
        if progress is not None:
            progress(reads.samples)
    if not samples:
        raise DataError(f"{registry.path}: the training split has no rows to profile")
    found = {}
    for table in tables:
        access = counters[table.name].access(
            table.name, table.features, table.num_embeddings, samples
        )
        if table.name in shared:
            batch_size = registry.training.batch_size
            access = access.of_unique_rows(batch_size, every_row[table.name])
        found[table.name] = access
    first = "the first " if rows is not None and rows <= samples else ""
    return AccessProfile(found, f"{first}{samples:,} rows of {registry.path}")


def _stored_reads(
    registry: RunConfig, tables: Sequence[Table], rows: int | None
) -> Iterator[Reads]:
    """Of the first ``rows`` rows, all of them, as preprocessing leaves them."""
    from recd_plugins.data.sent_reads import Reads
    from recd_plugins.model_tables import rows_by_feature

    ids_of = _IdsOf(registry, rows_by_feature(tables))
    for batch in training_rows(registry, rows):
        ids = ids_of(batch)
        of_tables = {table.name: [ids[f] for f in table.features] for table in tables}
        every_row = {name: sum(map(len, each)) for name, each in of_tables.items()}
        yield Reads(len(batch), of_tables, every_row)


class _IdsOf:
    """The ids of features in a batch of rows, as their tables see them."""

    def __init__(self, registry: RunConfig, num_embeddings: Mapping[str, int]) -> None:
        from recd_plugins.data.fitted_steps import fitted_steps
        from recd_plugins.data.preprocess import Preprocess

        self._num_embeddings = num_embeddings
        self._preprocess = Preprocess(fitted_steps(registry, registry.dataset.schema()))

    def __call__(self, rows: Rows) -> dict[str, NDArray[np.int64]]:
        import torch

        from recd_plugins.data.arrow import sparse_column
        from recd_plugins.data.check_ids import check_ids
        from recd_plugins.sparse.from_columns import kjt_from_columns
        from recd_plugins.values.batch import Batch

        columns = {name: sparse_column(rows, name) for name in self._num_embeddings}
        nothing = torch.empty(len(rows), 0)
        batch = self._preprocess(
            Batch(nothing, nothing.sum(1), kjt_from_columns(columns, len(rows)))
        )
        check_ids(batch, self._num_embeddings, rows, self._preprocess.made_by)
        assert batch.kjt is not None, "preprocessing keeps it"
        return {name: jagged.values().numpy() for name, jagged in batch.kjt.to_dict().items()}


def _check_features(registry: RunConfig, tables: Sequence[Table]) -> None:
    with plugin_call(registry.dataset, "schema"):
        features = registry.dataset.schema().sparse
    for table in tables:
        for feature in table.features:
            if feature not in features:
                near = get_close_matches(feature, features, n=1)
                advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(features)}"
                raise DataError(
                    f"{registry.path}: table {table.name} looks up feature {feature}, which the "
                    f"dataset does not have; {advice}"
                )
