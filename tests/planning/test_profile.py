"""The profile of data against batches as the model gets them: lengths and distinct ids."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins import RunConfig
from recd_plugins.data.access import table_reads
from recd_plugins.data.row_pipeline import RowPipeline, read_first_rows
from recd_plugins.interfaces import Table
from recd_plugins.interfaces.batch import Batch
from recd_plugins.interfaces.data_profile import DataProfile, DistinctIds, FeatureProfile
from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.profile import distinct_reads, measure_profile, measure_reads
from recd_plugins.planning.study import ShardableModel, with_plugins

CONVERTERS = [
    {"use": "recd.kjt"},
    {"use": "recd.ikjt"},
    {"use": "recd.ikjt", "options": {"groups": [["usr_0", "usr_1"], ["seq_0_0"]]}},
    {"use": "recd.partial_ikjt"},
]


def travels(registry: RunConfig, num_batches: int) -> dict[str, float]:
    batch_size = registry.training.batch_size
    reader = registry.dataset.reader(rank=0, world_size=1, batch_size=batch_size, split="train")
    found: dict[str, float] = {}
    for batch in islice(RowPipeline(registry).read(reader), num_batches):
        for kjt in (batch.sparse_features, batch.sequence_features):
            if kjt is not None:
                for name, ids in zip(kjt.keys(), kjt.length_per_key(), strict=True):
                    found[name] = found.get(name, 0) + ids / num_batches
    return found


@pytest.mark.parametrize("batches", [1, 16])
@pytest.mark.parametrize("converter", CONVERTERS, ids=str)
def test_it_is_the_mean_of_the_first_batches(make_registry, converter, batches: int) -> None:
    registry = make_registry(converter=converter)
    profile = measure_profile(registry, least_rows=256 * batches)
    assert profile.source == f"the first {256 * batches:,} rows"
    ids = travels(registry, batches)
    assert ids.keys() == profile.features.keys()
    for name, feature in profile.features.items():
        is_pooled = not name.startswith("seq_")
        assert feature.ids(256, pooled=is_pooled) == pytest.approx(ids[name])
        assert feature.deduplicated == (name in registry.converter.dedupe_factors())


@pytest.mark.parametrize(("most_columns", "rows"), [(16_384, 128), (1, 16)])
def test_few_batches_are_looked_at_if_there_are_many_columns(
    make_registry, monkeypatch: pytest.MonkeyPatch, most_columns: int, rows: int
) -> None:
    monkeypatch.setattr("recd_plugins.planning.profile._MOST_COLUMNS", most_columns)
    registry = make_registry(converter=CONVERTERS[0], training={"batch_size": 2})
    assert measure_profile(registry).source == f"the first {rows} rows"


def test_rows_that_a_batch_reads_are_counted_coalesced_or_not(make_registry) -> None:
    candidate = with_plugins(make_registry())
    profile, tables = candidate.profile, candidate.tables
    assert not profile.distinct
    assert profile.read.keys() == {table.name for table in tables}
    for table in tables:
        assert 0 < profile.read[table.name].of(256) <= profile.plain().ids(table, 256)


def test_no_batch_shares_more_than_it_has() -> None:
    feature = FeatureProfile(10.0, True, 0.9, 0.9, 0.95)
    assert feature.rows(1) == 1
    assert feature.dedupe_factor(1, pooled=True) == 1
    assert feature.dedupe_factor(2, pooled=True) == pytest.approx(2 / 1.1)
    assert feature.dedupe_factor(10**9, pooled=True) == pytest.approx(10)
    assert feature.dedupe_factor(10**9, pooled=False) == pytest.approx(20)
    assert feature.plain().dedupe_factor(10**9, pooled=False) == 1
    assert FeatureProfile(0.0).dedupe_factor(8, pooled=True) == 1
    assert DataProfile({}).of("missing") == FeatureProfile(length=1.0)


@pytest.fixture
def candidate(make_registry: Any) -> ShardableModel:
    coalescing = {"use": "torchrec.planner", "tables": ["t_*"], "options": {"coalesce": True}}
    return with_plugins(make_registry(sharding=[coalescing]))


def test_between_and_beyond_measured_sizes_they_grow_with_a_power() -> None:
    distinct = DistinctIds((4, 16, 64), (10.0, 20.0, 80.0))
    assert [distinct.of(size) for size in (4, 16, 64)] == pytest.approx([10, 20, 80])
    assert distinct.of(8) == pytest.approx(10 * 2**0.5)
    assert distinct.of(1) == pytest.approx(5)
    assert distinct.of(256) == pytest.approx(320)


def test_of_the_first_batch_they_are_exact(candidate: ShardableModel) -> None:
    prepared, registry = candidate.prepared, candidate.prepared.registry
    assert prepared.coalesced == {table.name for table in candidate.tables}
    (batch,) = RowPipeline.of_model(registry, prepared).read([read_first_rows(registry).rows])
    profile = measure_profile(registry, coalesced=candidate.tables, least_rows=1)
    for table in candidate.tables:
        kjt = batch.sparse_features if table.pooled else batch.sequence_features
        assert kjt is not None
        ids = [kjt[name].values() for name in table.features]
        distinct = len(torch.unique(torch.cat(ids)))
        assert profile.ids(table, 256) == pytest.approx(distinct)
        assert profile.ids(table, 16) < distinct
    assert not profile.plain().distinct


def test_of_several_batches_they_are_the_mean(candidate: ShardableModel) -> None:
    registry, tables = candidate.prepared.registry, candidate.tables
    size = registry.training.batch_size
    batches = [reads.ids for reads in table_reads(registry, tables, None, deduplicated=True)][:32]
    assert len(batches) > 1
    for name, distinct in distinct_reads(registry, tables).items():
        counts = [len(np.unique(np.concatenate(ids[name]))) for ids in batches]
        assert distinct.of(size) == pytest.approx(np.mean(counts))
        assert distinct.of(size) <= distinct.of(2 * size) <= 2 * distinct.of(size)


def test_of_a_first_batch_that_has_none_they_are_the_mean() -> None:
    batches = []
    for ids in ([], [3, 3, 5], [1]):
        values, lengths = torch.tensor(ids, dtype=torch.int64), torch.tensor([len(ids), 0, 0, 0])
        kjt = KeyedJaggedTensor(["a"], values, lengths=lengths)
        batches.append(Batch(torch.zeros(4, 0), torch.zeros(4), kjt))
    read = measure_reads(batches, [Table("t_a", ("a",), 10, 8, pooled=True)])
    assert [read["t_a"].of(size) for size in (4, 8)] == [1, 2]


def test_the_planner_is_told_of_them(candidate: ShardableModel) -> None:
    constraints = table_constraints(
        candidate.prepared, candidate.tables, profile=candidate.profile, device_type="cpu"
    )
    for table in candidate.tables:
        found = constraints[table.name]
        assert "data_parallel" not in (found.sharding_types or ())
        assert found.batch_sizes is not None
        sent = np.dot(found.batch_sizes, found.pooling_factors)
        assert sent == pytest.approx(candidate.profile.ids(table, 256))
