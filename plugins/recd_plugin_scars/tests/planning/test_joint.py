"""The search for cache and batch size, against check values and enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from recd_plugin_scars.planning import Memory, RowOrder, StepCosts, TableLoad
from recd_plugin_scars.planning.order import least
from recd_plugins.interfaces.access import TableAccess
from recd_plugins.interfaces.distributions import from_weights, zipf
from recd_plugins.runtime.errors import SetupError

PAPER = Memory(total=20_000, sample=40)
Floats = NDArray[np.float64]


def falling(exponent: float, scale: float) -> TableAccess:
    """2,000 rows whose weights fall exponentially, or as half of a normal distribution."""
    return from_weights("t", np.exp(-((np.arange(2000) / scale) ** exponent) / exponent), 1.0)


def order_of(*accesses: TableAccess, row_bytes: Sequence[float] = (16.0,)) -> RowOrder:
    return RowOrder([TableLoad(access, 16) for access in accesses], row_bytes)


@pytest.mark.parametrize(
    ("access", "memory", "step", "cached", "cost"),
    [
        (zipf("t", 2000, 1.0, 1.0), PAPER, 2000.0, 313, 9.845068),
        (falling(1.0, 200.0), PAPER, 2000.0, 448, 8.867255),
        (falling(2.0, 400.0), PAPER, 2000.0, 562, 10.692285),
        (zipf("t", 2000, 1.0, 1.0), Memory(total=6000, sample=300), 0.0, 356, 4.37440),
    ],
)
def test_check_values(
    access: TableAccess, memory: Memory, step: float, cached: int, cost: float
) -> None:
    best = order_of(access).best(memory, StepCosts(step=step))
    assert best.place == cached
    assert best.cost == pytest.approx(cost, abs=6e-6)
    assert best.batch_size == pytest.approx((memory.total - 16 * cached) / memory.sample)


def weights(rng: np.random.Generator) -> Floats:
    rows = int(rng.integers(5, 300))
    rank = np.arange(1, rows + 1, dtype=np.float64)
    match rng.integers(6):
        case 0:
            return rank ** -rng.uniform(0.3, 2.5)
        case 1:
            return np.exp(-rank / rng.uniform(1, rows))
        case 2:
            return np.exp(-((rank / rng.uniform(1, rows)) ** 2) / 2)
        case 3:  # plateaus
            levels = np.sort(10 ** rng.uniform(-6, 0, 4))[::-1]
            return levels[np.searchsorted(np.sort(rng.integers(1, rows, 3)), rank - 1, "right")]
        case 4:  # counts, some of them 0
            return np.append(1.0, np.sort(rng.integers(0, 50, rows))[::-1] / 50)
        case _:
            return np.sort(rng.pareto(1, rows))[::-1]


def brute_force(p: Floats, row: float, memory: Memory, step: float, last: int) -> Floats:
    found = []
    for cached in range(last + 1):
        b = (memory.total - cached * row) / memory.sample
        unique = -np.expm1(b * np.log1p(-np.minimum(p[cached:], 1 - 1e-16))).sum()
        found.append((step + row * unique) / b)
    return np.array(found)


def test_the_solver_equals_brute_force() -> None:
    rng = np.random.default_rng(0)
    with_two_minima = 0
    for case in range(300):
        access = from_weights("t", weights(rng), 1.0)
        rows = access.num_embeddings
        row = float(rng.integers(1, 65))
        sample = 10 ** rng.uniform(0, 1.5)
        memory = Memory(row * rows * 10 ** rng.uniform(-1, 1) + 2 * sample, sample)
        step = 0.0 if case % 3 == 0 else 10 ** rng.uniform(0, 4)
        last = min(rows, int((memory.total - sample) // row))
        costs = brute_force(access.accesses, row, memory, step, last)
        best = order_of(access, row_bytes=[row]).best(memory, StepCosts(step=step))
        # Of equal costs the first; the two sums differ in their last digits.
        first = int(np.argmax(costs <= costs.min() * (1 + 1e-12) + 1e-300))
        assert best.place == first or costs[best.place] == pytest.approx(costs[first], rel=1e-12)
        assert best.place <= first or costs[first] > 0
        assert best.cost == pytest.approx(1 + costs[first], rel=1e-12)
        steps = np.diff(costs)
        rises = steps[np.abs(steps) > 1e-9 * costs[1:]] > 0
        with_two_minima += bool((rises[:-1] & ~rises[1:]).any())
    # Halving alone goes wrong on some of these.
    assert with_two_minima > 1


def test_ties_go_to_fewer_rows() -> None:
    assert least(lambda place: max(0.0, 7.0 - place), 1000) == 7
    assert least(lambda _: 3.0, 1000) == 0
    # All rows that are read are cached, and the rest is free: no more than that is.
    access = from_weights("t", np.array([4.0, 2.0, 1.0]), 1.0, num_embeddings=500)
    best = order_of(access).best(Memory(20_000, 400), StepCosts())
    assert (best.place, best.cost) == (3, 1.0)


def unique_bytes(
    loads: Sequence[TableLoad], sizes: Sequence[float], rows: Sequence[int], batch: float
) -> float:
    total = 0.0
    for load, size, cached in zip(loads, sizes, rows, strict=True):
        p = load.access.accesses[cached:] / load.access.total
        total += size * float((1 - (1 - p) ** (batch * load.lookups)).sum())
    return total


@pytest.mark.parametrize("seed", range(10))
def test_rows_and_batch_together_as_enumeration_finds(seed: int) -> None:
    rng = np.random.default_rng(seed + 100)
    loads, sizes = [], [12.0, 36.0]
    for dim in (2, 8):
        weights = np.sort(rng.random(6))[::-1]
        loads.append(TableLoad(from_weights(f"t{dim}", weights, rng.uniform(0.5, 3)), dim))
    sample = float(rng.uniform(5, 80))
    memory = Memory(float(rng.uniform(200, 900)), sample, largest_batch=12)
    costs = StepCosts(sample=2.0, step=float(rng.choice([0, 100, 1000])), byte=0.5)
    order = RowOrder(loads, sizes)
    best = order.best(memory, costs)
    found = {}
    for place in range(order.num_rows + 1):
        batch = min(12.0, (memory.total - order.bytes(place)) / sample)
        if batch >= 1:
            fetched = unique_bytes(loads, sizes, order.rows(place), batch)
            found[place] = 2.0 + (costs.step + 0.5 * fetched) / batch
    assert best.cost == pytest.approx(min(found.values()), rel=1e-12)
    assert found[best.place] == pytest.approx(best.cost, rel=1e-12)
    # No other shares of the same memory are better: the order is the same for all batches.
    for rows in product(range(7), repeat=2):
        used = sum(n * size for n, size in zip(rows, sizes, strict=True))
        if (batch := min(12.0, (memory.total - used) / sample)) >= 1:
            fetched = unique_bytes(loads, sizes, rows, batch)
            # Bytes between two places of the order are at most one row.
            cost = 2.0 + (costs.step + 0.5 * (fetched + max(sizes))) / batch
            assert cost >= best.cost * (1 - 1e-12)


def test_memory_without_room_for_a_batch() -> None:
    with pytest.raises(SetupError, match="too small for a batch of 8 samples of 40 bytes"):
        order_of(zipf("t", 10, 1.0, 1.0)).best(Memory(100, 40, least_batch=8), StepCosts())
