from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from recd_plugin_dynamic.index.bucket_index import IdIndex
from recd_plugin_dynamic.index.mix import bucket_of, mix
from recd_plugin_dynamic.index.policies import LeastRecentlyUsed, NoEviction
from recd_plugins.api import DataError, SetupError


class Reference:
    """One dict per bucket. ``score(entry, step)`` works on a dict of one id's state."""

    def __init__(self, buckets, rows, policy):
        self.buckets, self.rows, self.policy = buckets, rows, policy
        self.known = defaultdict(dict)

    def find_or_insert(self, ids, counts, step):
        evicted, new = [], []
        mixed = mix(ids)
        where = bucket_of(mixed, self.buckets)
        for bucket in np.unique(where).tolist():
            known = self.known[bucket]
            at = np.flatnonzero(where == bucket)
            at = at[np.argsort(mixed[at])].tolist()
            for index in at:
                if (entry := known.get(int(ids[index]))) is not None:
                    self.policy.update(entry, int(counts[index]), step)
            unknown = [index for index in at if int(ids[index]) not in known]
            needed = len(unknown) - (self.rows - len(known))
            if needed > 0:
                ranked = sorted(
                    (self.policy.score(entry, step), entry["mixed"], key)
                    for key, entry in known.items()
                    if entry["last"] < step
                )
                expired = sum(score == -np.inf for score, *_ in ranked)
                num = max(needed, self.rows // 32, expired)
                leaving = [key for score, _, key in ranked[:num] if score < np.inf]
                if len(leaving) < needed:
                    raise SetupError(f"bucket {bucket}")
                evicted += [(key, known.pop(key)["row"]) for key in leaving]
            taken = {entry["row"] for entry in known.values()}
            first = bucket * self.rows
            free = [row for row in range(first, first + self.rows) if row not in taken]
            for index, row in zip(unknown, free, strict=False):
                entry = known[int(ids[index])] = {
                    "row": row,
                    "last": step,
                    "mixed": int(mixed[index]),
                }
                self.policy.update(entry, int(counts[index]), step, new=True)
                new.append(index)
        rows = [self.known[b][i]["row"] for b, i in zip(where.tolist(), ids.tolist(), strict=True)]
        return rows, new, evicted


class ReferenceLru:
    def update(self, entry, count, step, new=False):
        entry["last"] = step

    def score(self, entry, step):
        return entry["last"]


class ReferenceNone(ReferenceLru):
    def score(self, entry, step):
        return np.inf


REFERENCES = {LeastRecentlyUsed: ReferenceLru, NoEviction: ReferenceNone}


def batches(steps, size, num_ids, drift=10):
    """Yield distinct ids whose popularity is uneven and drifts, and their counts."""
    draw = np.random.default_rng(0)
    pool = draw.integers(0, 2**63 - 1, num_ids + steps * drift)
    for step in range(steps):
        drawn = pool[draw.zipf(1.2, size) % num_ids + step * drift]
        ids, counts = np.unique(drawn, return_counts=True)
        order = draw.permutation(len(ids))
        yield step, ids[order], counts[order]


def split(index_of, world, buckets):
    width = buckets // world
    return [index_of(rank * width, (rank + 1) * width) for rank in range(world)]


def find_or_insert(indexes, ids, counts, step):
    """Send ids to the index of their bucket. Return rows, new indices and evicted (id, row)."""
    owners = bucket_of(mix(ids), indexes[0].num_buckets) // (
        indexes[0].last_bucket - indexes[0].first_bucket
    )
    rows, new, evicted = np.empty_like(ids), [], []
    for rank, index in enumerate(indexes):
        at = np.flatnonzero(owners == rank)
        found = index.find_or_insert(ids[at], counts[at], step)
        rows[at] = found.rows
        new += at[found.new].tolist()
        evicted += zip(found.evicted_ids.tolist(), found.evicted_rows.tolist(), strict=True)
    return rows.tolist(), new, evicted


@pytest.mark.parametrize("policy", REFERENCES)
def test_ids_against_dicts_on_1_2_and_4_ranks(policy):
    buckets, rows = 8, 500
    reference = Reference(buckets, rows, REFERENCES[policy]())
    splits = [
        split(lambda a, b: IdIndex(a, b, buckets, rows, policy()), world, buckets)
        for world in (1, 2, 4)
    ]
    num_ids = num_evicted = 0
    stream = (180, 5_000, 30_000) if policy is not NoEviction else (400, 2_000, 2_000, 1)
    for step, ids, counts in batches(*stream):
        expected_rows, expected_new, expected_evicted = reference.find_or_insert(ids, counts, step)
        for indexes in splits:
            found_rows, new, evicted = find_or_insert(indexes, ids, counts, step)
            assert found_rows == expected_rows
            assert sorted(new) == sorted(expected_new)
            assert sorted(evicted) == sorted(expected_evicted)
        num_ids += len(ids)
        num_evicted += len(expected_evicted)
    known = sorted(pair for each in reference.known.values() for pair in each.items())
    ids = np.array([key for key, _ in known])
    np.testing.assert_array_equal(splits[0][0].find(ids), [entry["row"] for _, entry in known])
    assert sum(map(len, splits[2])) == len(ids)
    assert (num_evicted > num_ids / 2) == (policy is not NoEviction)


def test_state_loads_at_another_world_size():
    buckets, rows = 8, 50
    before = split(lambda a, b: IdIndex(a, b, buckets, rows, LeastRecentlyUsed()), 2, buckets)
    stream = list(batches(20, 250, 2_000))
    for step, ids, counts in stream[:10]:
        find_or_insert(before, ids, counts, step)
    states = [each.state() for each in before]
    whole = {name: np.concatenate([each[name] for each in states]) for name in states[0]}
    after = split(lambda a, b: IdIndex(a, b, buckets, rows, LeastRecentlyUsed()), 4, buckets)
    for index in after:
        index.load_state(
            {name: each[index.first_bucket : index.last_bucket] for name, each in whole.items()}
        )
    assert sum(map(len, after)) == sum(map(len, before)) > 350
    for step, ids, counts in stream[10:]:
        assert find_or_insert(after, ids, counts, step) == find_or_insert(before, ids, counts, step)


def test_full_buckets():
    ids = np.arange(10)
    with pytest.raises(SetupError, match=r"capacity of 8 ids cannot take 10 new ids at step 3"):
        IdIndex(0, 1, 1, 8, LeastRecentlyUsed()).find_or_insert(ids, None, 3)
    index = IdIndex(0, 1, 1, 8, LeastRecentlyUsed(), skip_if_full=True)
    found = index.find_or_insert(ids, None, 0)
    assert sorted(found.rows.tolist()) == [-1, -1, *range(8)]
    # Ids of the last two steps stay.
    index = IdIndex(0, 1, 1, 8, LeastRecentlyUsed(), keep_steps=2)
    index.find_or_insert(ids[:8], None, 0)
    with pytest.raises(SetupError, match="evicts only 0 of its 8 ids"):
        index.find_or_insert(ids[8:], None, 1)
    assert len(index.find_or_insert(ids[8:], None, 2).evicted_ids) == 2
    with pytest.raises(DataError, match="id '-3' is negative"):
        index.find_or_insert(np.array([1, -3]), None, 2)
    assert index.find(np.array([99])) == -1
