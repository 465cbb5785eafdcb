"""What the planner knows of the data: lengths of features, and how far they are deduplicated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from recd_plugins.data.arrow import sparse_column
from recd_plugins.data.row_pipeline import RowPipeline, Transforms, fit_converter
from recd_plugins.data.wrapped_dataset import FirstRows, read_first_rows
from recd_plugins.interfaces import Rows, Table
from recd_plugins.planning.distinct import measure_reads
from recd_plugins.planning.equal_gradients import measure_gradients, pooled_alike
from recd_plugins.registry import RunConfig
from recd_plugins.registry.run_config import NoDataset
from recd_plugins.sparse.dedup import Deduplicator
from recd_plugins.values.batch import Batch, Placement
from recd_plugins.values.data_profile import DataProfile, FeatureProfile
from recd_plugins.values.statistics import FeatureStatistics, TableStatistics

# Features that share their unique rows.
_Group = dict[str, FeatureProfile]
# One small batch may have few sessions, and far fewer distinct ids than the next.
_LEAST_ROWS, _MOST_BATCHES = 4096, 64
# Of hundreds of columns fewer batches do: each takes time for each column.
_MOST_COLUMNS, _FEW_BATCHES = 16_384, 8


def measure_profile(
    registry: RunConfig,
    *,
    num_embeddings: Mapping[str, int] | None = None,
    coalesced: Sequence[Table] = (),
    others: Sequence[Table] = (),
    least_rows: int = _LEAST_ROWS,
) -> DataProfile:
    """The profile of the training split as the registry converts and preprocesses it.

    The first batches show which features the converter deduplicates, and how. Where the table
    carries statistics, and no wrapper puts its rows into another order, lengths and shares of
    repeated rows and ids are the whole table's; else they too are the mean of these batches, as
    distinct ids of coalesced tables always are.

    Args:
        registry: its dataset, converter and preprocessing.
        num_embeddings: rows of the table of each feature; ids of others are not checked.
        coalesced: tables whose ids are made unique before they are sent.
        others: whose rows are counted as well that a batch reads.
        least_rows: to look at, in batches; but no more than 64 of these, and no more than 8 of
            tables with thousands of columns.

    Raises:
        DataError: the data is missing or wrong.
        PluginError: a plugin failed.
        RegistryError: a pattern matches no feature.
    """
    if isinstance(registry.dataset, NoDataset):
        return DataProfile({}, "no data: one id a row, as TorchRec assumes")
    first = read_first_rows(registry)
    rows, in_wrappers = first.rows, first.dataset is not registry.dataset
    fit_converter(registry, rows)
    transforms = Transforms.of(registry, Placement(), num_embeddings)  # nothing is lowered
    pipeline = RowPipeline(registry, transforms)
    batch = pipeline.batch(rows)
    most = max(_FEW_BATCHES, min(_MOST_BATCHES, _MOST_COLUMNS // rows.data.num_columns))
    count = min(-(-least_rows // len(rows)), most)
    looked_at = [rows, *first.batches(count)]
    batches = [batch, *map(pipeline.batch, looked_at[1:])]
    tables = list({table.name: table for table in (*coalesced, *others)}.values())
    read, spread = measure_reads(batches, tables, num_embeddings or ())
    distinct = {table.name: read[table.name] for table in coalesced}
    alike = pooled_alike(registry) & set(num_embeddings or ())
    gradients = measure_gradients(batches, tables, alike)
    groups = _mean([list(_groups(each)) for each in batches])
    seen = {name: profile for group in groups for name, profile in group.items()}
    known = registry.dataset.statistics()
    if in_wrappers or known is None or not known.features.keys() >= seen.keys():
        num_rows = sum(map(len, looked_at))
        source = f"the first {num_rows:,} rows{_order(registry, first)}"
        return DataProfile(
            seen, source, distinct=distinct, read=read, spread=spread, gradients=gradients
        )
    features = {
        name: profile
        for group in groups
        for name, profile in _of_whole_table(group, known, looked_at).items()
    }
    source = f"the statistics that the table of {known.rows:,} rows carries"
    source += _order(registry, first)
    return DataProfile(
        features, source, known.samples_per_session, distinct, read, spread, gradients
    )


def _mean(batches: Sequence[list[_Group]]) -> list[_Group]:
    """The mean of the profiles of some batches, whose features are in the same groups."""
    if len(batches) == 1:
        return batches[0]
    seen = [{name: found for group in batch for name, found in group.items()} for batch in batches]

    def mean(name: str) -> FeatureProfile:
        of_batches = [each[name] for each in seen if name in each]
        length = fmean(each.length for each in of_batches)
        ids = length or 1.0
        return replace(
            of_batches[0],
            length=length,
            repeated_rows=fmean(each.repeated_rows for each in of_batches),
            repeated_ids=fmean(each.length * each.repeated_ids for each in of_batches) / ids,
            shared_ids=fmean(each.length * each.shared_ids for each in of_batches) / ids,
        )

    return [{name: mean(name) for name in group} for group in batches[0]]


def _order(registry: RunConfig, first: FirstRows) -> str:
    """In words, whose order the rows have where the dataset has wrappers, and whose they lack."""
    used = registry.wrappers[: len(registry.wrappers) - len(first.left_out)]
    named = [
        f"{entry.plugin.name} ({registry.path}:{entry.line} {entry.field})"
        for entry in (*used, *first.left_out)
    ]
    by, without = " and ".join(named[: len(used)]), " and ".join(named[len(used) :])
    ordered = f", as {by} {'order' if len(used) > 1 else 'orders'} them" if used else ""
    lacking = (
        f", without {without}, by which batches of training may have other dedupe factors: recd "
        "run counts their ids"
    )
    return ordered + (lacking if first.left_out else "")


def _of_whole_table(
    group: Mapping[str, FeatureProfile], known: TableStatistics, looked_at: Sequence[Rows]
) -> dict[str, FeatureProfile]:
    """Features that share their unique rows: a row repeats where all of them do.

    How often the one that repeats least does so is known of the whole table; how often the others
    do not repeat where it does, the first rows show.
    """
    statistics = {name: known.features[name] for name in group}
    repeated_rows = min(feature.exact_rows for feature in statistics.values())
    if len(group) > 1:
        repeated_rows *= _coincidence(looked_at[0], list(group))
    found = {}
    for name, profile in group.items():
        own = statistics[name]
        length = own.length * _growth(profile, looked_at, name)
        if not profile.deduplicated:
            found[name] = FeatureProfile(length)
            continue
        together = repeated_rows / own.exact_rows if own.exact_rows else 0.0
        repeated = own.exact_duplication * together
        partial = profile.shared_ids > profile.repeated_ids
        found[name] = FeatureProfile(
            length,
            deduplicated=True,
            repeated_rows=repeated_rows,
            repeated_ids=repeated,
            shared_ids=_shifted(own) if partial else repeated,
        )
    return found


def _coincidence(rows: Rows, names: Sequence[str]) -> float:
    """Rows that repeat in all of several features over those that repeat in each one."""
    columns = [sparse_column(rows, name) for name in names]
    together, *alone = (
        len(rows) - int(unique.inverse_lookup.max() + 1)
        for unique in Deduplicator()([columns, *([column] for column in columns)], len(rows))
    )
    return together / min(alone) if min(alone) else 0.0


def _shifted(feature: FeatureStatistics) -> float:
    return feature.shifted_ids / feature.ids if feature.ids else 0.0


def _growth(profile: FeatureProfile, looked_at: Sequence[Rows], name: str) -> float:
    """What preprocessing makes of the length of a feature: 1 where it keeps it."""
    stored, num_rows = 0.0, sum(map(len, looked_at))
    for rows in looked_at:
        _, offsets = sparse_column(rows, name)
        stored += float(offsets[-1] - offsets[0]) / num_rows
    return profile.length / stored if stored else 1.0


def _groups(batch: Batch) -> Iterable[_Group]:
    """The features of a batch, those together that share their unique rows."""
    size = batch.batch_size
    if batch.kjt is not None:
        for name, jagged in batch.kjt.to_dict().items():
            yield {name: FeatureProfile(jagged.values().numel() / size)}
    for ikjt in batch.ikjts:
        counts = torch.bincount(ikjt.inverse_lookup().long(), minlength=ikjt.num_unique())
        yield {
            name: _deduplicated(
                size,
                ids=int((jagged.lengths() * counts).sum()),
                rows=ikjt.num_unique(),
                unique=int(jagged.lengths().sum()),
            )
            for name, jagged in ikjt.to_unique_kjt().to_dict().items()
        }
    for partial in batch.partials:
        alone = [[key] for key in partial.keys()]  # noqa: SIM118
        exact = {ikjt.keys()[0]: ikjt for ikjt in partial.to_ikjt(alone)}
        for name, values, _, lengths in partial.split():
            yield {
                name: _deduplicated(
                    size,
                    ids=int(lengths.sum()),
                    rows=exact[name].num_unique(),
                    unique=exact[name].values().numel(),
                    stored=values.numel(),
                )
            }


def _deduplicated(
    batch_size: int, *, ids: int, rows: int, unique: int, stored: int | None = None
) -> FeatureProfile:
    repeated = _share(batch_size, ids, unique)
    return FeatureProfile(
        length=ids / batch_size,
        deduplicated=True,
        repeated_rows=_share(batch_size, batch_size, rows),
        repeated_ids=repeated,
        shared_ids=repeated if stored is None else _share(batch_size, ids, stored),
    )


def _share(batch_size: int, whole: int, kept: int) -> float:
    """The probability that what follows the first row is left out, where ``kept`` remain."""
    if not whole or batch_size == 1:
        return 0.0
    return min(1.0, (1 - kept / whole) * batch_size / (batch_size - 1))
