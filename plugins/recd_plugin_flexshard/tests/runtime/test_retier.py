"""Tiers follow the data while training goes on, and training is that without tiers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from recd_plugin_flexshard.runtime.retier import Chosen, RecentAccesses, RetierReport, choose_rows
from recd_plugin_flexshard.tests.runtime.model import (
    TIERS,
    Job,
    Optimizer,
    largest_difference,
    make_batch,
)
from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.testing.gloo import run_on_ranks

MINE = TIERS["moving"]
TOLERANCE = 1e-6
EVERY, STEPS, DRIFT = 3, 18, 17


@dataclass(frozen=True)
class Drifted:
    """How training with tiers that move differs from one without tiers, and what they did.

    ``ahead``: steps after which batches had been distributed by other tiers than the rows were in.
    """

    difference: float
    ahead: int
    reports: list[RetierReport]


def drift(
    rank: int, world_size: int, optimizer: Optimizer, pipelined: bool, evaluate: bool, save: bool
) -> Drifted:
    moving, plain = Job(optimizer, MINE, retier_every=EVERY), Job(optimizer, None)
    difference, ahead = 0.0, 0
    # A pipeline is empty before it evaluates.
    length = 6 if evaluate else STEPS
    for first in range(0, STEPS, length):
        batches, same = (
            iter([make_batch(rank, world_size, first + step, DRIFT) for step in range(length)])
            for _ in range(2)
        )
        for step in range(length):
            if pipelined:
                got, want = moving.pipeline.progress(batches), plain.pipeline.progress(same)
            else:
                got, want = (
                    job.train_on([next(each)])[0]
                    for job, each in ((moving, batches), (plain, same))
                )
            difference = max(difference, float((got[0] - want[0]).abs()))
            ahead += moving.tiered.index is not moving.tiered._copies.index
            if save and step % 2:
                state = moving.everything()
                difference = max(difference, largest_difference(state, plain.everything()))
        if evaluate:
            got, want = (job.evaluate(first, pipelined=pipelined) for job in (moving, plain))
            difference = max(difference, float((got - want).abs()))
    last = largest_difference(moving.everything(), plain.everything())
    return Drifted(max(difference, last), ahead, moving.tiered.retier_reports)


@pytest.mark.parametrize(
    ("layout", "optimizer", "pipelined", "evaluate", "save"),
    [
        ((2, 1), "sgd", False, True, True),
        ((4, 2), "rowwise_adagrad", True, False, True),
        ((2, 1), "rowwise_adagrad", True, True, False),
    ],
)
def test_training_is_that_without_tiers(
    layout: tuple[int, int], optimizer: Optimizer, pipelined: bool, evaluate: bool, save: bool
) -> None:
    size, local = layout
    found = run_on_ranks(drift, size, optimizer, pipelined, evaluate, save, local_world_size=local)
    for each in found:
        assert each.difference <= TOLERANCE
        assert each.reports == found[0].reports
    _check_reports(found[0].reports)
    # A pipeline distributes batches by new tiers before the rows have moved.
    assert found[0].ahead > 1 if pipelined else found[0].ahead == 0


def _check_reports(reports: list[RetierReport]) -> None:
    assert [report.step for report in reports] == list(range(EVERY, STEPS, EVERY))
    assert all(report.moved for report in reports)
    assert all(report.a2a_share_after < report.a2a_share_before for report in reports)
    # Six steps of each distribution: after half of them the tiers are of the one before, and then
    # of this one.
    for stale, fresh in zip(reports[2::2], reports[3::2], strict=False):
        assert fresh.a2a_share_before < stale.a2a_share_before - 0.1


def look_up_in_any_order(rank: int, world_size: int) -> float:
    job, plain = Job("rowwise_adagrad", MINE, retier_every=1), Job("rowwise_adagrad", None)
    job.train(range(1))
    plain.train(range(1))
    batches: list[Any] = [
        make_batch(rank, world_size, step, DRIFT).sequence_features for step in (1, 6, 12)
    ]
    distributed = []
    for batch in batches:
        context = job.tiered.create_context()
        distributed.append((context, job.tiered.input_dist(context, batch).wait().wait()))
    assert len({id(context.split.index) for context, _ in distributed if context.split}) == 3
    difference = 0.0
    for number in (1, 0, 2, 0, 1):
        with torch.no_grad():
            got = job.tiered.compute_and_output_dist(*distributed[number])
            for name, want in plain.collection(batches[number]).items():
                apart = (got[name].values() - want.values()).abs()
                difference = max(difference, float(apart.sum()))
    return max(difference, largest_difference(job.everything(), plain.everything()))


def test_batches_are_looked_up_in_any_order() -> None:
    assert max(run_on_ranks(look_up_in_any_order, 4, local_world_size=2)) <= TOLERANCE


def backward_after_rows_moved(rank: int, world_size: int) -> None:
    job = Job("sgd", MINE, retier_every=1)
    first = job.dmp(make_batch(rank, world_size, 0))[0]
    job.dmp(make_batch(rank, world_size, 1))
    with pytest.raises(ExactnessError, match="retier_every"):
        first.backward()


def test_a_backward_pass_after_the_rows_moved_is_refused() -> None:
    run_on_ranks(backward_after_rows_moved, 2, local_world_size=1)


@dataclass(frozen=True)
class Case:
    """Keys are multiples of ``factor``; rank 1 reads none where there are few accesses."""

    num_keys: int
    num_hot: int
    num_flex: int
    accesses: int
    skew: float
    factor: int = 1

    def draw(self, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        weights = (1.0 + np.arange(self.num_keys)) ** -self.skew
        count = 0 if rank == 1 and self.accesses < 10 else self.accesses
        random = np.random.default_rng(rank)
        return self.factor * random.choice(self.num_keys, count, p=weights / weights.sum())

    def tiers(self) -> list[np.ndarray[Any, Any]]:
        keys = self.factor * np.random.default_rng(7).permutation(self.num_keys)
        return np.split(keys, [self.num_hot, self.num_hot + self.num_flex])[:2]


CASES = [
    Case(1000, num_hot=20, num_flex=30, accesses=8, skew=0.0),
    Case(200, num_hot=15, num_flex=25, accesses=60, skew=0.5),  # many ties
    Case(500, num_hot=10, num_flex=40, accesses=3000, skew=1.2, factor=4),
    Case(30, num_hot=10, num_flex=20, accesses=50, skew=1.0),  # every row has a copy
    Case(50, num_hot=0, num_flex=7, accesses=0, skew=1.0),
]


def choose(rank: int, world_size: int) -> list[Chosen]:
    chosen = []
    for case in CASES:
        recent = RecentAccesses()
        for part in np.array_split(case.draw(rank), 3):
            recent.add(torch.from_numpy(part))
        hot, flex = case.tiers()
        assert dist.group.WORLD is not None
        chosen.append(choose_rows(recent.take(), hot, flex, dist.group.WORLD))
        assert len(recent.take()[0]) == 0
    return chosen


def test_the_most_read_rows_of_all_ranks_are_chosen() -> None:
    for of_rank in run_on_ranks(choose, 2):
        for case, got in zip(CASES, of_rank, strict=True):
            counts = Counter(np.concatenate([case.draw(rank) for rank in range(2)]).tolist())
            hot, flex = (keys.tolist() for keys in case.tiers())
            tier = {**dict.fromkeys(hot, 0), **dict.fromkeys(flex, 1)}
            order = sorted(
                counts.keys() | tier.keys(), key=lambda key: (-counts[key], tier.get(key, 2), key)
            )[: len(tier)]
            assert got.hot.tolist() + got.flex.tolist() == order
            assert len(got.hot) == len(hot)
            after = {**dict.fromkeys(order, 1), **dict.fromkeys(got.hot.tolist(), 0)}
            both = tier.keys() | after.keys()
            assert got.moved == sum(tier.get(key, 2) != after.get(key, 2) for key in both)
            assert got.accesses == counts.total()
            assert got.covered_before == sum(counts[key] for key in tier)
            assert got.covered_after == sum(counts[key] for key in order)


def test_counts_are_bounded_and_the_heaviest_stay() -> None:
    bound = 64
    recent = RecentAccesses(bound)
    random = np.random.default_rng(0)
    heavy = np.arange(8)
    exact = np.zeros(100_000)
    for _ in range(50):
        keys = np.concatenate([np.repeat(heavy, 5), random.integers(8, 100_000, 60)])
        np.add.at(exact, keys, 1)
        recent.add(torch.from_numpy(keys))
    keys, counts = recent.take()
    assert len(keys) <= bound
    assert set(heavy) <= set(keys.tolist())
    assert (counts <= exact[keys]).all()
    assert (counts >= exact[keys] - exact.sum() / bound).all()
