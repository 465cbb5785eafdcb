"""The profile of data against batches as the model gets them: lengths, distinct ids, gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.planning.test_study import report, text
from tests.planning.test_work import NOTHING, plan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins import RunConfig
from recd_plugins.data.access import table_reads
from recd_plugins.data.row_pipeline import RowPipeline, first_rows, fitted_transforms
from recd_plugins.interfaces import Table
from recd_plugins.interfaces.batch import Batch
from recd_plugins.interfaces.data_profile import (
    DataProfile,
    DistinctGradients,
    DistinctIds,
    FeatureProfile,
)
from recd_plugins.interfaces.step_cost import StageCosts
from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.profile import (
    as_run_sends,
    distinct_reads,
    measure_gradients,
    measure_profile,
    measure_reads,
)
from recd_plugins.planning.step_cost import estimate_step_cost
from recd_plugins.planning.study import ShardableModel, with_plugins
from recd_plugins.planning.topologies import this_machine
from recd_plugins.sharding.wire import scalar_bytes
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor

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


COALESCING = [{"use": "torchrec.planner", "tables": ["t_*"], "options": {"coalesce": True}}]


@pytest.fixture
def candidate(make_registry: Any) -> ShardableModel:
    return with_plugins(make_registry(sharding=COALESCING))


def test_between_and_beyond_measured_sizes_they_grow_with_a_power() -> None:
    distinct = DistinctIds((4, 16, 64), (10.0, 20.0, 80.0))
    assert [distinct.of(size) for size in (4, 16, 64)] == pytest.approx([10, 20, 80])
    assert distinct.of(8) == pytest.approx(10 * 2**0.5)
    assert distinct.of(1) == pytest.approx(5)
    assert distinct.of(256) == pytest.approx(320)


def test_of_the_first_batch_they_are_exact(candidate: ShardableModel) -> None:
    prepared, registry = candidate.prepared, candidate.prepared.registry
    assert prepared.coalesced == {table.name for table in candidate.tables}
    transforms = fitted_transforms(registry, prepared)
    (batch,) = RowPipeline(registry, transforms).read([first_rows(registry)])
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
    batches = [
        Batch(
            torch.zeros(4, 0),
            torch.zeros(4),
            KeyedJaggedTensor(
                ["a"],
                torch.tensor(ids, dtype=torch.int64),
                lengths=torch.tensor([len(ids), 0, 0, 0]),
            ),
        )
        for ids in ([], [3, 3, 5], [1])
    ]
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
        sent = sum(
            size * length
            for size, length in zip(found.batch_sizes, found.pooling_factors, strict=True)
        )
        assert sent == pytest.approx(candidate.profile.ids(table, 256))


def test_the_report_says_what_comes_back(make_registry: Any) -> None:
    made = report(make_registry(sharding=COALESCING), this_machine(2))
    assert " vectors come back to a rank in a step, without " in text(made)
    sequences = [table for table in made.plugins.tables if not table.pooled]
    for table in sequences:
        assert table.uncoalesced_vectors is not None
        assert 0 < table.vectors < table.uncoalesced_vectors
    assert made.plain is not None
    assert all(table.uncoalesced_vectors is None for table in made.plain.tables)


_TABLE = Table("t", ("f", "g"), 64, 8, pooled=False)


def _rows(seed: int) -> list[list[list[int]]]:
    """Ids by row of two features; sessions of three rows have nearly the same lists."""
    generator = np.random.default_rng(seed)
    features = []
    for _ in "fg":
        rows: list[list[int]] = []
        for _ in range(4):
            ids = generator.integers(64, size=generator.integers(9)).tolist()
            rows += [ids, ids, [*ids[1:], int(generator.integers(64))]]
        features.append(rows)
    return features


def _batch(features: Sequence[Sequence[Sequence[int]]], form: str) -> Batch:
    lengths = torch.tensor([len(row) for rows in features for row in rows])
    ids = torch.tensor([i for rows in features for row in rows for i in row])
    kjt = KeyedJaggedTensor(["f", "g"], ids, lengths=lengths)
    rest: dict[str, Any] = {"dense_features": torch.zeros(12, 0), "labels": torch.zeros(12)}
    if form == "kjt":
        return Batch(kjt=kjt, **rest)
    if form == "ikjt":
        ikjts = tuple(InverseKeyedJaggedTensor.from_kjt(kjt, [["f"], ["g"]]))
        return Batch(ikjts=ikjts, **rest)
    return Batch(partials=(PartialInverseKeyedJaggedTensor.from_kjt(kjt),), **rest)


def _differing(features: Sequence[Sequence[Sequence[int]]], owners: int) -> tuple[int, int]:
    """Distinct gradients by owner of rows, and all, where each id has one."""
    of_id: dict[int, Counter[tuple[int, int]]] = {}
    for feature, rows in enumerate(features):
        for number, row in enumerate(rows):
            for each in row:
                of_id.setdefault(each, Counter())[feature, number] += 1
    found = {(each * owners // 64, frozenset(rows.items())) for each, rows in of_id.items()}
    return len(found), len(of_id)


@pytest.mark.parametrize("form", ["kjt", "ikjt", "partial"])
@pytest.mark.parametrize("owners", [1, 2, 8])
def test_of_ids_that_are_sent_once(form: str, owners: int) -> None:
    drawn = [_rows(seed) for seed in range(3)]
    found = measure_gradients([_batch(each, form) for each in drawn], [_TABLE], ["f", "g"])
    differ, ids = np.sum([_differing(each, owners) for each in drawn], axis=0)
    assert 0.1 < differ / ids < 1
    assert found["t"].share(1.0, owners, coalesced=True) == pytest.approx(differ / ids)


def test_of_ids_wherever_they_are_stored() -> None:
    drawn = _rows(0)
    found = measure_gradients([_batch(drawn, "kjt")], [_TABLE], ["f", "g"])
    rows = [row for rows in drawn for row in rows]
    for owners in (1, 8):
        differ = sum(len({each * owners // 64 for each in row}) for row in rows)
        expected = differ / sum(map(len, rows))
        assert found["t"].share(1.0, owners, coalesced=False) == pytest.approx(expected)


def test_between_what_was_counted() -> None:
    known = DistinctGradients((1, 4), (0.5, 1.0), ((0.2, 0.4), (0.6, 0.8)), ((1.0, 1.0),) * 2)
    assert known.share(1.0, 2, coalesced=True) == pytest.approx(0.7)
    assert known.share(0.75, 4, coalesced=True) == pytest.approx(0.6)
    assert known.share(0.1, 9, coalesced=True) == pytest.approx(0.4)


@pytest.mark.parametrize(("share", "sent"), [(0.25, 0.25 * 64 + 2), (1.0, 64), (0.99, 64)])
def test_steps_send_them_over_gloo_between_nodes(share: float, sent: float) -> None:
    table = Table("t", ("f",), 100, 16, pooled=False)
    known = DistinctGradients((1,), (1.0,), ((1.0,),), ((share,),))
    profile = DataProfile({"f": FeatureProfile(3.0)}, gradients={"t": known})
    split = plan("row_wise", (0, 50, 16), (1, 50, 16))

    def across(**options: Any) -> float:
        works = estimate_step_cost(
            [table], split, profile, NOTHING, batch_size=10, world_size=2, **options
        )
        return works[0].bytes_across_nodes + works[0].bytes_in_node

    ids = 15 * 8 + 10 * 4
    assert across(gloo=True, local_world_size=1) == pytest.approx(ids + 15 * (sent + 64))
    for other in (
        {"local_world_size": 1},
        {"gloo": True},
        {"gloo": True, "local_world_size": 1, "wire": "int8"},
    ):
        wire = 1 if "wire" not in other else scalar_bytes("int8", [table]) / 4
        assert across(**other) == pytest.approx(ids + 15 * 128 * wire)


@pytest.mark.parametrize(("bits_per_second", "once"), [(200e6, True), (1e9, False), (None, True)])
def test_plans_count_what_runs_send(bits_per_second: float | None, once: bool) -> None:
    known = {"t": DistinctGradients((1,), (1.0,), ((0.5,),), ((0.5,),))}
    profile = DataProfile({"f": FeatureProfile(3.0)}, gradients=known)
    costs = None
    if bits_per_second is not None:
        links = {"all_to_all": {"bytes_across_nodes": 8 / bits_per_second}}
        costs = StageCosts.model_validate(links)
    assert as_run_sends(profile, costs).gradients == (known if once else {})
    assert as_run_sends(profile, costs).features == profile.features
