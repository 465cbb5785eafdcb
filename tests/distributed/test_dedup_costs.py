"""Bytes, ids and memory of a feature fall by its DedupeFactor (RecD, section 5)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from tests.sharded import CPU, SGD, bags, exact_sharders, sequences, shard
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.row_pipeline import lower
from recd_plugins.interfaces.batch import Batch, Placement
from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.step_profile import StepProfile

BATCH_SIZE, SESSION, LENGTH, ROWS = 480, 16, 40, 1000
Form = Literal["plain", "unique", "partial"]
#: Whether rows are pooled, the form, and whether each new row of a session is the one before moved
#: on by one id.
PARTS: dict[str, tuple[bool, Form, bool]] = {
    "pooled": (True, "unique", False),
    "sequence": (False, "unique", False),
    "partial_sequence": (False, "partial", True),
}


@dataclass(frozen=True)
class Cost:
    sent: Counter[str]  # bytes by payload
    ids: int
    memory: float  # the most bytes above those at the step's start
    batch_ids: int
    stored_ids: int
    stored_rows: int


def costs(rank: int, world_size: int, part: str, place: str, even: bool) -> tuple[Cost, Cost]:
    """The same rows plain and deduplicated; with ``even`` all of ``LENGTH`` ids, else of about."""
    pooled, form, moving = PARTS[part]
    kjt = _rows(rank, moving, even)
    found = []
    for each in ("plain", form):
        # A pooled feature's vectors of all rows are needed whatever is deduplicated: narrow ones
        # leave the memory to what can be.
        module = bags("f", rows=ROWS) if pooled else sequences("f", rows=ROWS, dim=32)
        found.append(_cost(shard(module, exact_sharders(SGD), place, CPU), pooled, kjt, each))
    return found[0], found[1]


def _cost(dmp: nn.Module, pooled: bool, kjt: KeyedJaggedTensor, form: str) -> Cost:
    forms: dict[str, Any] = {
        "plain": lambda: {"kjt": kjt},
        "unique": lambda: {"ikjts": InverseKeyedJaggedTensor.from_kjt(kjt, [["f"]])},
        "partial": lambda: {"partials": (PartialInverseKeyedJaggedTensor.from_kjt(kjt),)},
    }
    batch = Batch(torch.zeros(BATCH_SIZE, 0), torch.zeros(BATCH_SIZE), **forms[form]())
    lowered = lower(batch, Placement(pooled=("f",)) if pooled else Placement(sequence=("f",)))
    features = lowered.sparse_features if pooled else lowered.sequence_features
    # gloo's threads free some buffers late, which adds to some steps.
    memory = min(_peak(dmp, pooled, features) for _ in range(6))
    with CollectiveBytes() as counter, lookup_ids(dmp) as ids:
        _train(dmp, pooled, features)
    return Cost(
        Counter(counter.by("payload")),
        ids.total,
        memory,
        batch_ids=kjt.values().numel(),
        stored_ids=features.values().numel(),
        stored_rows=features.lengths().numel(),
    )


def _peak(dmp: nn.Module, pooled: bool, features: KeyedJaggedTensor) -> float:
    profile = StepProfile(CPU, warmup=1)
    for _ in range(3):
        with profile.step():
            _train(dmp, pooled, features)
    return profile.memory().peak


def _train(dmp: nn.Module, pooled: bool, features: KeyedJaggedTensor) -> None:
    output = dmp(features)
    values: Tensor = output.values() if pooled else output["f"].values()
    torch.autograd.backward(values, torch.ones(1, 1).expand_as(values))


def _rows(rank: int, moving: bool, even: bool) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(rank)
    lists: list[Tensor] = []
    for _ in range(BATCH_SIZE // SESSION):
        drawn = int(torch.randint(LENGTH // 2, LENGTH * 3 // 2, (1,), generator=random))
        length = LENGTH if even else drawn
        ids = torch.randint(0, ROWS, (length + SESSION,), generator=random)
        start = 0
        for _ in range(SESSION):
            lists.append(ids[start : start + length])
            if float(torch.rand(1, generator=random)) < 0.2:
                start += 1
                if not moving:
                    ids = torch.randint(0, ROWS, (length + SESSION,), generator=random)
    return KeyedJaggedTensor(
        ["f"], torch.cat(lists), lengths=torch.tensor([len(ids) for ids in lists])
    )


def run(part: str, place: str, even: bool) -> tuple[list[Cost], list[Cost]]:
    pairs = run_on_ranks(costs, 2, part, place, even)
    return [plain for plain, _ in pairs], [deduplicated for _, deduplicated in pairs]


def ratio(plain: list[Cost], deduplicated: list[Cost], *payloads: str) -> float:
    sides = (plain, deduplicated)
    before, after = (sum(c.sent[each] for c in side for each in payloads) for side in sides)
    return before / after


@pytest.mark.parametrize("place", ["table_wise", "row_wise"])
@pytest.mark.parametrize("part", list(PARTS))
def test_costs_fall_by_the_dedupe_factor(part: str, place: str) -> None:
    plain, deduplicated = run(part, place, True)
    # The table that is not sharded stands on rank 0, whose rows do not travel.
    travelled = deduplicated[1:] if place == "table_wise" else deduplicated
    factor = sum(c.batch_ids for c in travelled) / sum(c.stored_ids for c in travelled)
    assert factor > 3
    assert ratio(plain, deduplicated, "integers", "floats") == pytest.approx(factor, rel=0.02)
    assert ratio(plain, deduplicated, "floats") == pytest.approx(factor, rel=0.02)
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
    assert ratio(plain, deduplicated, "floats") == pytest.approx(rows)
    assert ratio(plain, deduplicated, "integers") == pytest.approx(ids, rel=0.02)
