"""The share of gradients that differ is that of rows which are in the same sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.planning.test_work import NOTHING, plan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.interfaces import Table
from recd_plugins.interfaces.batch import Batch
from recd_plugins.interfaces.data_profile import (
    DataProfile,
    DistinctGradients,
    FeatureProfile,
)
from recd_plugins.interfaces.step_cost import StageCosts
from recd_plugins.planning.profile import as_run_sends, measure_gradients
from recd_plugins.planning.step_cost import estimate_step_cost
from recd_plugins.sharding.wire import scalar_bytes
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor

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
