"""The demands of tables: what the cost model is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from recd_plugin_flexshard.planning import TableDemand
from recd_plugins.api import DataError
from recd_plugins.api.registry import did_you_mean, shortened

if TYPE_CHECKING:
    from recd_plugin_flexshard.options import TierOptions
    from recd_plugins.api import Setting, Table
    from recd_plugins.api.access import TableAccess


def demands_of(
    options: TierOptions, tables: Sequence[Table], setting: Setting
) -> list[TableDemand]:
    """What ``tables`` are asked for: their accesses, and the dedupe factors of their features.

    Raises:
        DataError: the data cannot be read, the access profile is not of these tables, or the option
            ``dedupe`` not of their features.
    """
    if isinstance(options.dedupe, dict):
        _check_features(options.dedupe, tables)
    of_data = options.dedupe == "data"
    profile = options.accesses(tables, setting, deduplicated=of_data)
    counts_distinct = options.coalesce or options.sync != "dense"
    distinct = setting.data.distinct(tables) if counts_distinct else {}
    demands = []
    for table in tables:
        access = profile.covering(table.name, table.num_embeddings)
        if access.batch_size is None:
            factor = _dedupe_factor(options, table, setting, setting.batch_size)
        elif of_data:
            factor = _counted_factor(access, access.batch_size, options, table, setting)
        else:
            raise DataError(
                f"{options.profile} counts {access.counted} for table {table.name}, and so has the "
                "dedupe factor of the data: leave the option dedupe out, or profile again with "
                "--all-rows"
            )
        demand = TableDemand.from_access(access, table.embedding_dim, factor)
        # Of a distribution, which no sample follows, the data says nothing.
        counted = distinct.get(table.name) if access.samples > 1 else None
        # A profile may know other features.
        demands.append(replace(demand, features=len(table.features), distinct=counted))
    return demands


def _counted_factor(
    access: TableAccess, batch_size: int, options: TierOptions, table: Table, setting: Setting
) -> float:
    """That of a profile, for the batch size of ``setting``: it grows as that of the data does."""
    known = setting.data.profile()
    if not any(known.of(name).deduplicated for name in table.features):
        raise DataError(
            f"the access profile counts {access.counted} for table {table.name}, and the "
            f"registry's converter deduplicates none of {', '.join(table.features)}: profile again "
            "with this converter"
        )
    if batch_size == setting.batch_size:
        return access.dedupe_factor
    there, here = (
        _dedupe_factor(options, table, setting, size) for size in (batch_size, setting.batch_size)
    )
    return max(1.0, access.dedupe_factor * here / there)


def _dedupe_factor(options: TierOptions, table: Table, setting: Setting, batch_size: int) -> float:
    """Ids of a table's features over those that are looked up, in a batch of so many rows."""
    dedupe = options.dedupe
    if dedupe == "none":
        return 1.0
    if isinstance(dedupe, float):
        return dedupe
    known = setting.data.profile()
    all_ids = unique_ids = 0.0
    for name in table.features:
        feature = known.of(name)
        if isinstance(dedupe, dict):
            factor = dedupe[name]
        else:
            factor = feature.dedupe_factor(batch_size, pooled=False)
        all_ids += feature.length
        unique_ids += feature.length / factor
    return all_ids / unique_ids if unique_ids else 1.0


def _check_features(dedupe: Mapping[str, float], tables: Sequence[Table]) -> None:
    features = [name for table in tables for name in table.features]
    if missing := [name for name in features if name not in dedupe]:
        raise DataError(
            f"the option dedupe has no number for feature {shortened(missing)}; give each one, "
            "1 if it is not deduplicated"
        )
    for name in dedupe:
        if name not in features:
            raise DataError(
                f"the option dedupe has a number for {name}, which is no feature of these tables"
                + (did_you_mean(name, features) or f"; their features: {shortened(features)}")
            )
