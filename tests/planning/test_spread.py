"""Reads that are spread unevenly over the rows of a table, and what ranks do for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.planning.test_work import NOTHING, plan
from torchrec.distributed.types import ShardingPlan

from recd_plugins.data.row_pipeline import RowPipeline, first_rows, fitted_transforms
from recd_plugins.interfaces import Table
from recd_plugins.planning.candidates import with_plugins
from recd_plugins.planning.distinct import measure_reads
from recd_plugins.planning.profile import measure_profile
from recd_plugins.planning.work import work_of_step
from recd_plugins.values.data_profile import DataProfile, DistinctIds, FeatureProfile, Spread
from recd_plugins.values.work import Work


def test_reads_are_spread_over_rows_as_they_are_counted(make_registry: Any) -> None:
    registry = make_registry(converter={"use": "recd.kjt"})
    batches = [RowPipeline(registry, fitted_transforms(registry)).batch(first_rows(registry))]
    (table, *_) = with_plugins(registry).tables
    kjt = batches[0].kjt
    assert kjt is not None
    ids = np.concatenate([kjt[name].values().numpy() for name in table.features])
    _, spread = measure_reads(batches, [table], table.features)
    for end in (0, 1, 100, 255, 256):
        rows = end * table.num_embeddings / 256
        bounds = np.array([[0, end / 256]])
        for shares, counted in (
            (spread[table.name].ids, ids),
            (spread[table.name].rows, np.unique(ids)),
        ):
            assert Spread.between(shares, bounds) == pytest.approx((counted < rows).mean())
    # What ids will be rows of that are mapped later, nobody knows yet.
    assert not measure_reads(batches, [table], ())[1]
    unread = replace(table, features=("nothing",))
    assert not measure_reads(batches, [unread], unread.features)[1]


def test_profiles_have_it_of_ids_that_are_rows(make_registry: Any) -> None:
    candidate = with_plugins(make_registry())
    assert candidate.profile.spread.keys() == {table.name for table in candidate.tables}
    unchecked = measure_profile(make_registry(), others=candidate.tables, least_rows=1)
    assert unchecked.read
    assert not unchecked.spread


def test_ranks_that_have_the_rows_that_are_read_look_up_and_send_them() -> None:
    spread = Spread(ids=(0.7, 0.9, 1.0, 1.0), rows=(0.4, 0.7, 0.9, 1.0))
    feature = {"f": FeatureProfile(3.0)}
    split = plan("row_wise", *((rank, 25, 8) for rank in range(4)))

    def found(profile: DataProfile, sharding: ShardingPlan = split) -> list[Work]:
        table = Table("t", ("f",), 100, 8, pooled=False)
        return work_of_step(
            [table], sharding, profile, NOTHING, batch_size=10, world_size=4, local_world_size=1
        )

    read = {"t": DistinctIds((10, 40), (20.0, 50.0))}
    alike, uneven = (
        found(DataProfile(feature, read=read, spread=known)) for known in ({}, {"t": spread})
    )
    assert [work.ids_looked_up for work in alike] == [30] * 4
    assert [work.ids_looked_up for work in uneven] == pytest.approx([84, 24, 12, 0])
    assert [work.rows_updated for work in uneven] == pytest.approx([20, 15, 10, 0])
    first, *_, last = uneven
    # Ids and gradients of three others' rows, and rows to three others.
    assert first.bytes_across_nodes == pytest.approx(30 * 0.3 * 40 + 3 * 10 * 4 + 3 * 21 * 32)
    assert last.bytes_across_nodes == pytest.approx(30 * 40 + 3 * 10 * 4)
    # Of coalesced ids each is sent once.
    once = found(DataProfile(feature, read=read, distinct=read, spread={"t": spread}))
    assert [work.ids_looked_up for work in once] == pytest.approx([32, 24, 16, 8])
    # A rank with two quarters of the rows; and one that has all.
    halves = found(
        DataProfile(feature, spread={"t": spread}), plan("row_wise", (0, 50, 8), (1, 50, 8))
    )
    assert [work.ids_looked_up for work in halves] == pytest.approx([108, 12, 0, 0])
    whole = plan("table_wise", (2, 100, 8))
    assert found(DataProfile(feature, spread={"t": spread}), whole) == found(
        DataProfile(feature), whole
    )
