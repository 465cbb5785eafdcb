"""Access profiles of the tables that a registry's data is looked up in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, StrictInt

from recd_plugins.access.profile import AccessProfile
from recd_plugins.access.table_access import TableCounter
from recd_plugins.errors import DataError
from recd_plugins.interfaces import PlanContext, PluginOptions, Table

if TYPE_CHECKING:
    from recd_plugins.registry import RunConfig

#: Distinct rows that are counted exactly, of all tables together, unless a bound is given.
EXACT_ROWS = 1 << 25
_LEAST_BOUND = 1 << 16


class AccessOptions(PluginOptions):
    """Options of plugins that choose by access frequency: a file, or rows to count at start."""

    profile: Path | None = Field(
        default=None,
        description="Access profile, as recd profile writes it; null counts at start, on every "
        "rank.",
    )
    profile_rows: Annotated[StrictInt, Field(gt=0)] | None = Field(
        default=65_536,
        description="Rows of the training split, the first ones, that are counted at start; null "
        "counts all.",
    )

    def accesses(
        self, tables: Sequence[Table], setting: PlanContext, *, deduplicated: bool = True
    ) -> AccessProfile:
        """Return how often each row of ``tables`` is read.

        Args:
            tables: of the model.
            setting: whose data is counted where there is no file.
            deduplicated: as ``TrainingData.access`` takes it; a file is as it was counted.

        Raises:
            DataError: the data cannot be read, or the file is no access profile.
        """
        if self.profile is None:
            return setting.data.access(tables, self.profile_rows, deduplicated=deduplicated)
        return AccessProfile.load(self.profile)


def measure_access(
    registry: RunConfig,
    tables: Sequence[Table],
    *,
    rows: int | None = None,
    bound: int | None = None,
    deduplicated: bool = True,
    progress: Callable[[int], None] | None = None,
) -> AccessProfile:
    """Count how often the training split reads each row of ``tables``, after preprocessing.

    It streams, and is the same in every process. A table with features that the converter
    deduplicates counts the ids of the unique rows of a batch.

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
    from recd_plugins.data.access import deduplicated_tables, sent_reads, stored_reads

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
    if bound is None:
        bound = max(_LEAST_BOUND, EXACT_ROWS // max(1, len(tables)))
    counters = {table.name: TableCounter(bound) for table in tables}
    every_row = dict.fromkeys(counters, 0)
    shared = deduplicated_tables(registry, tables) if deduplicated else set()
    samples = 0
    for reads in (sent_reads if shared else stored_reads)(registry, tables, rows):
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
