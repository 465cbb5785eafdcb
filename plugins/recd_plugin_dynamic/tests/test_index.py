from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from recd_plugin_dynamic.index.bucket_index import IdIndex
from recd_plugin_dynamic.index.mix import bucket_of, mix
from recd_plugin_dynamic.index.policies import (
    EvictionPolicy,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    NoEviction,
    TimeToLive,
)
from recd_plugins.api import DataError, SetupError

BUCKETS = 8


class OldestFirst(EvictionPolicy):
    """A policy as a user writes it: evicts the ids that got a row first, after 20 steps at once."""

    arrays: ClassVar = {"steps": np.int16}
    sweep_every = 4

    def update(self, arrays, rows, counts, step):
        arrays["steps"][rows] += 1

    def score(self, arrays, step):
        return np.where(arrays["steps"] > 20, -np.inf, -arrays["steps"].astype(float))


#: Score of each policy for the state of one id.
SCORES = {
    "none": lambda entry, step: np.inf,
    "lru": lambda entry, step: entry["last"],
    "lfu": lambda entry, step: entry["count"] * np.exp2((entry["last"] - step) / 8.0),
    "ttl": lambda entry, step: -np.inf if step - entry["last"] > 16 else np.inf,
    "OldestFirst": lambda entry, step: -np.inf if entry["steps"] > 20 else -entry["steps"],
}


class Reference:
    """A simple dynamic table to test against: per bucket, a dict from id to its state."""

    def __init__(self, policy, rows, skip_if_full=False, min_count=1, candidates_per_bucket=None):
        self.policy, self.rows, self.skip, self.min_count = policy, rows, skip_if_full, min_count
        self.half_life = getattr(policy, "half_life", np.inf)
        self.known = [{} for _ in range(BUCKETS)]
        if min_count > 1:
            self.candidates = Reference(LeastRecentlyUsed(), candidates_per_bucket, True)

    def find_or_insert(self, ids, counts, step):
        rows, evicted = {}, []
        mixed = mix(ids)
        order = np.argsort(mixed)
        buckets = bucket_of(mixed, BUCKETS)
        for bucket, known in enumerate(self.known):
            here = order[buckets[order] == bucket]
            columns = (each[here].tolist() for each in (ids, mixed, counts))
            batch = list(zip(*columns, strict=True))
            for key, _, count in batch:
                if key in known:
                    self._update(known[key], count, step)
            if self.policy.sweep_every and step % self.policy.sweep_every == 0:
                evicted += self._evict(known, 0, step)
            new = [each for each in batch if each[0] not in known]
            if self.min_count > 1 and new:
                new = self._admitted(new, bucket, step)
            needed = len(new) - (self.rows - len(known))
            if needed > 0:
                evicted += self._evict(known, max(needed, self.rows // 32), step)
            taken = {entry["row"] for entry in known.values()}
            free = [row for row in range(self.rows) if row not in taken]
            assert self.skip or len(free) >= len(new)
            for (key, hashed, count), row in zip(new, free, strict=False):
                known[key] = {"row": row, "mixed": hashed, "last": step, "count": 0.0, "steps": 0}
                self._update(known[key], count, step)
            first = bucket * self.rows
            rows |= {key: known[key]["row"] + first if key in known else -1 for key, *_ in batch}
            evicted = [each if len(each) == 2 else (each[0], each[1] + first) for each in evicted]
        return [rows[key] for key in ids.tolist()], evicted

    def _update(self, entry, count, step):
        entry["count"] = entry["count"] * np.exp2((entry["last"] - step) / self.half_life) + count
        entry["last"], entry["steps"] = step, entry["steps"] + 1

    def _evict(self, known, num, step):
        score = SCORES[self.policy.name]
        ranked = sorted(
            (score(entry, step), entry["mixed"], key)
            for key, entry in known.items()
            if entry["last"] < step
        )
        num = max(num, sum(each[0] == -np.inf for each in ranked))
        leaving = [key for value, _, key in ranked[:num] if value < np.inf]
        return [(key, known.pop(key)["row"], None) for key in leaving]

    def _admitted(self, new, bucket, step):
        ids, _, counts = (np.array(each) for each in zip(*new, strict=True))
        self.candidates.find_or_insert(ids, counts, step)
        known = self.candidates.known[bucket]
        total = {key: known[key]["count"] if key in known else count for key, _, count in new}
        for key in total:
            if total[key] >= self.min_count:
                known.pop(key, None)
        return [each for each in new if total[each[0]] >= self.min_count]


def batches(steps, size, num_ids, drift=10):
    """Yield the step, distinct ids and counts of Zipf draws, shifted by ``drift`` ids per step."""
    draw = np.random.default_rng(0)
    pool = draw.integers(0, 2**63 - 1, num_ids + steps * drift)
    for step in range(steps):
        drawn = pool[draw.zipf(1.2, size) % num_ids + step * drift]
        ids, counts = np.unique(drawn, return_counts=True)
        order = draw.permutation(len(ids))
        yield step, ids[order], counts[order]


def split(policy, rows, world, **options):
    width = BUCKETS // world
    return [
        IdIndex(rank * width, (rank + 1) * width, BUCKETS, rows, policy, **options)
        for rank in range(world)
    ]


def find_or_insert(indexes, ids, counts, step):
    """Send ids to the index of their bucket. Return rows, new indices and evicted (id, row)."""
    owners = bucket_of(mix(ids), BUCKETS) // (BUCKETS // len(indexes))
    rows, new, evicted = np.empty_like(ids), [], []
    for rank, index in enumerate(indexes):
        at = np.flatnonzero(owners == rank)
        found = index.find_or_insert(ids[at], counts[at], step)
        rows[at] = found.rows
        new += at[found.new].tolist()
        evicted += zip(found.evicted_ids.tolist(), found.evicted_rows.tolist(), strict=True)
    return rows.tolist(), sorted(new), sorted(evicted)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (NoEviction(), {}),
        (NoEviction(), {"skip_if_full": True}),
        (LeastRecentlyUsed(), {}),
        (LeastFrequentlyUsed(half_life=8), {}),
        (LeastFrequentlyUsed(half_life=8), {"min_count": 3, "candidates_per_bucket": 300}),
        (TimeToLive(16), {"skip_if_full": True}),
        (OldestFirst(), {"min_count": 2, "candidates_per_bucket": 300}),
    ],
    ids=lambda each: each.name if isinstance(each, EvictionPolicy) else "-".join(each),
)
def test_ids_against_dicts_on_1_2_and_4_ranks(policy, options):
    rows = 100 if options or policy.name != "none" else 300
    reference, num_evicted = Reference(policy, rows, **options), 0
    splits = [split(policy, rows, world, **options) for world in (1, 2, 4)]
    for step, ids, counts in batches(30, 500, 1_500, drift=10 if rows == 100 else 1):
        expected_rows, expected_evicted = reference.find_or_insert(ids, counts, step)
        for indexes in splits:
            found, _, evicted = find_or_insert(indexes, ids, counts, step)
            assert found == expected_rows
            assert evicted == sorted(expected_evicted)
        num_evicted += len(evicted)
    assert sum(map(len, splits[2])) == sum(map(len, reference.known)) > 300
    assert (num_evicted > 200) == (policy.name != "none")


def test_a_million_ids():
    (index,) = split(LeastRecentlyUsed(), 6_000, 1)
    known, num_ids = {}, 0
    for step, ids, counts in batches(60, 100_000, 60_000, drift=5_000):
        found = index.find_or_insert(ids, counts, step)
        for key, row in zip(found.evicted_ids.tolist(), found.evicted_rows.tolist(), strict=True):
            assert known.pop(key) == row
        new = ids[found.new]
        known |= zip(new.tolist(), found.rows[found.new].tolist(), strict=True)
        assert found.rows.tolist() == [known[key] for key in ids.tolist()]
        assert len(known) == len(index)
        assert (found.rows // 6_000 == bucket_of(mix(ids), BUCKETS)).all()
        assert (index.find(found.evicted_ids) == -1).all()
        num_ids += len(ids)
    assert len({*known.values()}) == len(known)
    assert num_ids > 1_000_000


def test_state_loads_at_another_world_size():
    policy, options = LeastFrequentlyUsed(), {"min_count": 2, "candidates_per_bucket": 20}
    before, after = (split(policy, 50, world, **options) for world in (2, 4))
    stream = list(batches(20, 250, 2_000))
    for step, ids, counts in stream[:10]:
        find_or_insert(before, ids, counts, step)
    states = [each.state() for each in before]
    whole = {name: np.concatenate([each[name] for each in states]) for name in states[0]}
    for index in after:
        own = slice(index.first_bucket, index.last_bucket)
        index.load_state({name: each[own] for name, each in whole.items()})
    assert sum(map(len, after)) == sum(map(len, before)) > 100
    for step, ids, counts in stream[10:]:
        assert find_or_insert(after, ids, counts, step) == find_or_insert(before, ids, counts, step)


def test_full_buckets():
    ids = np.arange(10)
    with pytest.raises(SetupError, match=r"capacity of 8 ids cannot take 10 new ids at step 3"):
        IdIndex(0, 1, 1, 8, LeastRecentlyUsed()).find_or_insert(ids, None, 3)
    index = IdIndex(0, 1, 1, 8, LeastRecentlyUsed(), skip_if_full=True)
    found = index.find_or_insert(ids, None, 0)
    assert sorted(found.rows.tolist()) == [-1, -1, *range(8)]
    index = IdIndex(0, 1, 1, 8, LeastRecentlyUsed())
    index.find_or_insert(ids[:8], None, 1)
    with pytest.raises(SetupError, match="evicts only 0 of its 8 ids"):  # of the same step
        index.find_or_insert(ids[8:], None, 1)
    assert len(index.find_or_insert(ids[8:], None, 2).evicted_ids) == 2
    with pytest.raises(DataError, match="id '-3' is negative"):
        index.find_or_insert(np.array([1, -3]), None, 2)
    assert index.find(np.array([99])) == -1
