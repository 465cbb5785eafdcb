"""Algorithms 1 and 2 against what they are by definition, and the figures of the DLRM paper."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recd_plugin_dlrm.trace.generator import (
    WITHIN,
    StackDistances,
    TableTrace,
    TraceGenerator,
    expected_counts,
    generator_of,
    least_new,
    profile_ids,
    worst_difference,
)

SOME_IDS = st.lists(st.integers(-3, 12), min_size=1, max_size=200)


def by_definition(trace: list[int]) -> tuple[list[int], list[int]]:
    stack: list[int] = []
    unique, distances = [], []
    for access in trace:
        if access in stack:
            distances.append(stack.index(access) + 1)
            stack.remove(access)
        else:
            distances.append(0)
            unique.append(access)
        stack.insert(0, access)
    return unique, distances


def hits(trace: list[int], size: int) -> float:
    cache: list[int] = []
    count = 0
    for access in trace:
        if access in cache:
            count += 1
            cache.remove(access)
        elif len(cache) == size:
            cache.pop()
        cache.insert(0, access)
    return count / len(trace)


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first / first.sum() - second / second.sum()).sum() / 2)


def uniform(seed: int = 0) -> TableTrace:
    return profile_ids(np.random.default_rng(seed).integers(1, 101, 100_000))


def test_the_papers_example() -> None:
    trace = [ord(letter) for letter in "abcabbda"]
    found = profile_ids(np.array(trace))
    assert [chr(each) for each in found.ids] == list("abcd")
    assert StackDistances().add(np.array(trace)).tolist() == [0, 0, 0, 3, 3, 1, 0, 3]
    shares = dict(zip(found.distances.tolist(), found.weights().tolist(), strict=True))
    assert shares == {0: 0.5, 1: 0.125, 3: 0.375}
    assert found.new_share == 0.5
    assert found.median_distance == 3
    trace = [1, 2, 3, 1, 2, 3, 3, 2, 1]
    assert StackDistances().add(np.array(trace)).tolist() == [0, 0, 0, 3, 3, 3, 1, 2, 3]


@given(SOME_IDS)
def test_distances_are_those_of_the_definition(trace: list[int]) -> None:
    unique, distances = by_definition(trace)
    found = StackDistances()
    assert found.add(np.array(trace)).tolist() == distances
    assert found.trace("x").ids.tolist() == unique


@given(SOME_IDS, st.integers(1, 20))
def test_hit_rates_are_those_of_a_cache_that_is_played(trace: list[int], size: int) -> None:
    assert profile_ids(np.array(trace)).hit_rates(np.array([size]))[0] == hits(trace, size)


@pytest.mark.parametrize("num_ids", [3, 60_000])
def test_long_traces_use_up_positions_of_the_stack(num_ids: int) -> None:
    trace = np.random.default_rng(1).integers(0, num_ids, 200_000) * (1 << 40)
    found = StackDistances()
    distances = found.add(trace)
    profile = found.trace("x")
    assert len(profile.ids) == len(np.unique(trace))
    assert (np.bincount(distances)[profile.distances] == profile.counts).all()
    end = trace[-500:].tolist()
    expected = [
        len({*trace[np.flatnonzero(trace[: 199_500 + at] == each)[-1] : 199_500 + at]})
        for at, each in enumerate(end[:20])
        if each in trace[: 199_500 + at]
    ]
    assert [each for each in distances[-500:-480] if each] == expected


@settings(max_examples=50)
@given(SOME_IDS, st.integers(0, 5), st.sampled_from([0.0, 0.3, 0.9]))
def test_what_is_drawn_are_the_distances_that_it_counts(
    trace: list[int], seed: int, min_new: float
) -> None:
    profile = profile_ids(np.array(trace))
    drawn = TraceGenerator(profile, seed, min_new)
    accesses = len(profile.ids) if len(profile.distances) == 1 else 150
    made = drawn.draw(accesses)
    found = StackDistances()
    distances = found.add(made)
    counted = [int((distances == each).sum()) for each in profile.distances]
    assert counted == drawn.counts.tolist()
    assert sum(counted) == accesses == drawn.accesses
    first_seen = found.trace("x").ids
    assert first_seen.tolist() == profile.ids[: len(first_seen)].tolist()
    assert drawn.num_ids == len(first_seen)
    again = TraceGenerator(profile, seed, min_new)
    pieces = [again.draw(min(7, accesses - first)) for first in range(0, accesses, 7)]
    assert np.concatenate(pieces).tolist() == made.tolist()


def steps_to_all(profile: TableTrace, seed: int, min_new: float) -> tuple[int, TraceGenerator]:
    drawn = TraceGenerator(profile, seed, min_new)
    trace = drawn.draw(profile.accesses)
    first = {int(each): step for step, each in reversed(list(enumerate(trace)))}
    assert len(first) == len(profile.ids)
    return max(first.values()) + 1, drawn


def test_unadjusted_traces_see_all_ids_late_and_with_a_raised_p0_early() -> None:
    """Means 49,500 and 5,000 accesses; the paper's remedy for short synthetic traces."""
    profile = uniform()
    own = [steps_to_all(profile, seed, 0) for seed in range(5)]
    raised = [steps_to_all(profile, seed, 0.01) for seed in range(5)]
    assert all(30_000 < steps < 70_000 for steps, _ in own)
    assert all(3_500 < steps < 6_500 for steps, _ in raised)
    apart = [[total_variation(profile.counts, each.counts) for _, each in s] for s in (own, raised)]
    assert all(0.07 < each < 0.17 for each in apart[0])
    assert all(0.012 < each < 0.02 for each in apart[1])


@pytest.mark.parametrize(("min_new", "accesses"), [(0.0, 20_000), (0.01, 100_000), (0.2, 300_000)])
def test_expected_traces_are_the_mean_of_those_that_are_drawn(
    min_new: float, accesses: int
) -> None:
    profile = uniform()
    counts = np.zeros(len(profile.counts))
    for seed in range(10):
        drawn = TraceGenerator(profile, seed, min_new)
        drawn.draw(accesses)
        counts += drawn.counts / 10
    expected = expected_counts(profile, accesses)(min_new)
    assert abs(expected.sum() / accesses - 1) < 1e-6
    assert total_variation(counts, expected) < 0.02
    assert abs(worst_difference(profile, counts) - worst_difference(profile, expected)) < 0.02


@pytest.mark.parametrize("exponent", [1.05, 1.2, 1.6])
def test_hit_rates_of_zipfs_law_are_kept(exponent: float) -> None:
    profile = profile_ids(np.random.default_rng(0).zipf(exponent, 200_000) % 10**7)
    drawn = generator_of(profile, profile.accesses, 3, None)
    drawn.draw(profile.accesses)
    assert worst_difference(profile, drawn.counts) < 0.01


def test_p0_is_raised_no_further_than_it_has_to_be() -> None:
    profile = uniform()
    share = least_new(profile, profile.accesses)
    expected = expected_counts(profile, profile.accesses)
    assert profile.new_share < share < 0.1
    differences = [worst_difference(profile, expected(each)) for each in (share, share * 0.75)]
    assert differences[0] <= WITHIN < differences[1]
    assert least_new(profile, profile.accesses, within=1.0) == profile.new_share
