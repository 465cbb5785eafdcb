"""Cached tables train as plain ones, bit for bit, whatever the sharding, policy and storage."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.covering import cells_of_today
from torch import Tensor

from recd_plugin_scars.runtime.kernel import cache_traffic, cached_kernels
from recd_plugin_scars.runtime.row_cache import CacheTraffic
from recd_plugin_scars.tests.runtime.model import (
    FORMS,
    OPTIMIZERS,
    ROWS,
    SHARDINGS,
    Case,
    Trainer,
    Training,
)
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.testing.gloo import run_on_ranks


@dataclass(frozen=True)
class Trained:
    outputs: list[Tensor]
    states: list[dict[str, Tensor]]


@dataclass(frozen=True)
class Difference:
    apart: float
    moved: float
    traffic: dict[str, CacheTraffic]
    unsaved: int


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Difference]:
    return [_run(rank, world_size, case) for case in cases]


def _run(rank: int, world_size: int, case: Case) -> Difference:
    plain = _plain(rank, world_size, case.training)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(case.training, case, Path(folder))
        cached = _train(trainer)
        traffic = cache_traffic(trainer.dmp)
        unsaved = sum(int(k._rows._pool.dirty.sum()) for k in cached_kernels(trainer.dmp))
    pairs = list(zip(cached.outputs, plain.outputs, strict=True))
    for state, other in zip(cached.states, plain.states, strict=True):
        pairs += [(state[name], other[name]) for name in other]
    before, after = plain.states
    apart = max(_distance(*pair) for pair in pairs)
    moved = max(_distance(after[name], each) for name, each in before.items())
    return Difference(apart, moved, traffic, unsaved)


@functools.cache
def _plain(rank: int, world_size: int, training: Training) -> Trained:
    return _train(Trainer(training, None, Path()))


def _train(trainer: Trainer) -> Trained:
    batches = [trainer.batch(step) for step in range(4)]
    trainer.start()
    first = iter([*batches, batches[1]])
    outputs = _progress(trainer, first, 2)
    states = [trainer.state()]
    trainer.pipeline.detach()
    outputs.append(trainer.evaluate(3))
    outputs += _progress(trainer, first)
    trainer.dmp.eval()
    with torch.no_grad():
        outputs += _progress(trainer, iter(batches[2:]))
    trainer.dmp.train()
    outputs += _progress(trainer, iter([batches[2], batches[0], batches[3]]))
    trainer.pipeline.detach()
    outputs.append(trainer.evaluate(0))
    return Trained(outputs, [*states, trainer.state(optimizer_first=True)])


def _progress(
    trainer: Trainer, batches: Iterator[ModelInput], steps: int | None = None
) -> list[Tensor]:
    outputs: list[Tensor] = []
    while steps is None or len(outputs) < steps:
        try:
            outputs.append(trainer.pipeline.progress(batches)[1])
        except StopIteration:
            break
    return outputs


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) if one.numel() else 0.0


def cases_of(world_size: int, sharding: str) -> list[Case]:
    cells = list(product((1, 2), SHARDINGS, range(2), range(2), range(4), range(2)))
    # With the same rows and lookahead each has another turn, so that all of them meet.
    turns: Counter[tuple[int, int]] = Counter()
    cases = []
    for ranks, by, form, optimizer, rows, lookahead in cells_of_today(cells, together=3):
        training = Training(by, FORMS[form], OPTIMIZERS[optimizer])
        case = Case(training, ROWS[rows], bool(lookahead), turns[rows, lookahead])
        turns[rows, lookahead] += 1
        if (ranks, by) == (world_size, sharding):
            cases.append(case)
    return cases


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_parity(world_size: int, sharding: str) -> None:
    _check(cases_of(world_size, sharding), world_size)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_parity_beside_tables_without_a_cache(sharding: str) -> None:
    training = Training(sharding, "unique", "rowwise_adagrad")
    uncached = (("b0", "s1", "s3"), ("b1", "b2", "s0", "s2"))
    _check([Case(training, turn=turn, uncached=each) for turn, each in enumerate(uncached)], 2)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_parity_of_coalesced_tables(sharding: str) -> None:
    """With plain tables that are not coalesced, whose sums are in another order."""
    cases = [
        Case(Training(by, form, "rowwise_adagrad"), "some", lookahead, FORMS.index(form), True)
        for by, form, lookahead in cells_of_today(list(product(SHARDINGS, FORMS, (False, True))))
        if by == sharding
    ]
    _check(cases, 2, tolerance=1e-6)


def test_coalescing_moves_the_same_rows_for_fewer_lookups() -> None:
    # With nothing kept, which row leaves first does not matter.
    plain = Case(Training("row_wise", "plain", "sgd"), "none", lookahead=False)
    fewer = 0
    for before, after in run_on_ranks(run_cases, 2, [plain, replace(plain, coalesced=True)]):
        for table, traffic in before.traffic.items():
            coalesced = after.traffic[table]
            assert coalesced.unique_rows == traffic.unique_rows
            assert coalesced.bytes_read == traffic.bytes_read
            assert coalesced.bytes_written == traffic.bytes_written
            fewer += traffic.lookups - coalesced.lookups
    assert fewer > 0


def _check(cases: list[Case], world_size: int, tolerance: float = 0.0) -> None:
    by_rank = run_on_ranks(run_cases, world_size, cases)
    for case, *differences in zip(cases, *by_rank, strict=True):
        for difference in differences:
            assert difference.apart <= tolerance, case
            # All that was learned is in the state dicts already.
            assert difference.unsaved == 0, case
            # Training moves the tables, or equal states would say nothing.
            assert difference.moved > 1e-3, case
        for table in differences[0].traffic | differences[-1].traffic:
            counts = [each.traffic[table] for each in differences if table in each.traffic]
            _assert_cached(case, table, sum(counts, CacheTraffic()))


def _assert_cached(case: Case, table: str, total: CacheTraffic) -> None:
    assert total.hits + total.misses == total.unique_rows > 0, (case, table)
    all_stay = case.rows == "all" and case.policy(table) != "lru"
    assert (total.misses == 0) == all_stay, (case, table)
    if case.rows == "none" and not case.lookahead:
        assert total.hits == 0, (case, table)
    if case.rows in ("some", "all"):
        assert total.hits > 0, (case, table)
