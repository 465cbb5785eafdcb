"""Bytes, ids and memory of a feature fall by its DedupeFactor (RecD, section 5)."""

from __future__ import annotations

import pytest
from tests.distributed.dedup_cases import BATCH_SIZE, Cost, Form, costs

from recd_plugins.testing.gloo import run_on_ranks

PARTS: dict[str, tuple[bool, Form, bool]] = {
    "pooled": (True, "unique", False),
    "sequence": (False, "unique", False),
    "partial_sequence": (False, "partial", True),
}


def run(part: str, sharding: str, even: bool) -> tuple[list[Cost], list[Cost]]:
    pooled, form, moving = PARTS[part]
    pairs = run_on_ranks(costs, 2, pooled, sharding, form, moving, even)
    return [plain for plain, _ in pairs], [deduplicated for _, deduplicated in pairs]


def num_sent(ranks: list[Cost], payload: str | None = None) -> int:
    return sum(
        num_bytes
        for cost in ranks
        for (_, kind), num_bytes in cost.sent.items()
        if payload in (None, kind)
    )


def senders(ranks: list[Cost], sharding: str) -> list[Cost]:
    """Ranks whose rows travel: the table that is not sharded stands on rank 0."""
    return ranks[1:] if sharding == "table_wise" else ranks


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
@pytest.mark.parametrize("part", list(PARTS))
def test_costs_fall_by_the_dedupe_factor(part: str, sharding: str) -> None:
    plain, deduplicated = run(part, sharding, True)
    travelled = senders(deduplicated, sharding)
    factor = sum(c.batch_ids for c in travelled) / sum(c.stored_ids for c in travelled)
    assert factor > 3
    assert num_sent(plain) / num_sent(deduplicated) == pytest.approx(factor, rel=0.02)
    assert num_sent(plain, "floats") / num_sent(deduplicated, "floats") == pytest.approx(
        factor, rel=0.02
    )
    assert sum(cost.ids for cost in plain) == sum(cost.batch_ids for cost in plain)
    assert sum(cost.ids for cost in deduplicated) == sum(c.stored_ids for c in deduplicated)
    overall = sum(c.batch_ids for c in deduplicated) / sum(c.stored_ids for c in deduplicated)
    peaks = [max(cost.memory for cost in ranks) for ranks in (plain, deduplicated)]
    assert peaks[0] / peaks[1] == pytest.approx(overall, rel=0.1)


def test_vectors_of_a_pooled_feature_fall_by_its_rows() -> None:
    plain, deduplicated = run("pooled", "row_wise", False)
    rows = len(plain) * BATCH_SIZE / sum(cost.stored_rows for cost in deduplicated)
    ids = sum(c.batch_ids for c in deduplicated) / sum(c.stored_ids for c in deduplicated)
    assert abs(rows - ids) > 0.1  # or the two could not be told apart
    assert num_sent(plain, "floats") / num_sent(deduplicated, "floats") == pytest.approx(rows)
    assert num_sent(plain, "integers") / num_sent(deduplicated, "integers") == pytest.approx(
        ids, rel=0.02
    )
