"""Lengths and dedupe factors of a profile against batches as the model gets them."""

from __future__ import annotations

import pytest

from recd_plugins import RunConfig
from recd_plugins.data.row_pipeline import RowPipeline
from recd_plugins.interfaces.data_profile import DataProfile, FeatureProfile
from recd_plugins.planning.profile import measure_profile
from recd_plugins.planning.study import with_plugins

CONVERTERS = [
    {"use": "recd.kjt"},
    {"use": "recd.ikjt"},
    {"use": "recd.ikjt", "options": {"groups": [["usr_0", "usr_1"], ["seq_0_0"]]}},
    {"use": "recd.partial_ikjt"},
]


def travels(registry: RunConfig, num_batches: int) -> dict[str, float]:
    """Ids that the model is fed by feature, the mean over batches."""
    batch_size = registry.training.batch_size
    reader = registry.dataset.reader(rank=0, world_size=1, batch_size=batch_size, split="train")
    found: dict[str, float] = {}
    for number, batch in enumerate(RowPipeline(registry).read(reader)):
        if number == num_batches:
            break
        for kjt in (batch.sparse_features, batch.sequence_features):
            if kjt is not None:
                for name, ids in zip(kjt.keys(), kjt.length_per_key(), strict=True):
                    found[name] = found.get(name, 0) + ids / num_batches
    return found


def is_pooled(name: str) -> bool:
    return not name.startswith("seq_")


@pytest.mark.parametrize("batches", [1, 16])
@pytest.mark.parametrize("converter", CONVERTERS, ids=str)
def test_it_is_the_mean_of_the_first_batches(make_registry, converter, batches: int) -> None:
    registry = make_registry(converter=converter)
    profile = measure_profile(registry, least_rows=256 * batches)
    assert profile.source == f"the first {256 * batches:,} rows"
    ids = travels(registry, batches)
    assert ids.keys() == profile.features.keys()
    for name, feature in profile.features.items():
        assert feature.ids(256, pooled=is_pooled(name)) == pytest.approx(ids[name])
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
