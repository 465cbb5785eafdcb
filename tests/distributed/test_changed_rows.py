from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.changed_row_cases import FEATURES, ROWS, TRAINING, batch, sharded_model
from tests.sharded import whole
from torch import Tensor

from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.changed_rows import ChangedRows
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.optimizer import build_optimizer


def differing(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, set[int]]:
    return {
        name: set((after[name] != before[name]).any(1).nonzero().flatten().tolist())
        for name in after
    }


def track(rank: int, world_size: int) -> Any:
    dmp = sharded_model()
    build_optimizer(dmp, TRAINING)
    tracker = ChangedRows.of(dmp, "a")
    assert ChangedRows.of(dmp, "b") is tracker
    taken: dict[str, list[dict[str, set[int]]]] = {"a": [], "b": []}
    changed = []

    def take(consumer: str) -> None:
        found: list[Any] = [None] * world_size
        dist.all_gather_object(found, tracker.take(consumer))
        rows: dict[str, set[int]] = {}
        for name, own in ((name, own) for of_rank in found for name, own in of_rank.items()):
            rows[name] = rows.get(name, set()) | set(own.tolist())
        taken[consumer].append(rows)

    before = whole(dmp.state_dict())
    for step in range(4):
        dmp.eval()
        with torch.no_grad():
            dmp(batch(rank, step + 100))
        dmp.train()
        dmp(batch(rank, step)).backward()
        after = whole(dmp.state_dict())
        changed.append(differing(before, after))
        before = after
        take("a")
        if step % 2:
            take("b")
    pending = dmp(batch(rank, 4))  # its rows change after the call of take()
    take("a")
    pending.backward()
    after = whole(dmp.state_dict())
    take("a")
    changed += [{}, differing(before, after)]
    dmp.load_state_dict(dmp.state_dict())
    take("a")
    return changed, taken


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_with_gradients_are_taken_once_by_each_consumer(world_size: int) -> None:
    changed, taken = run_on_ranks(track, world_size)[0]
    names = {f"bags.embedding_bags.t_{name}.weight" for name in FEATURES if name != "data_parallel"}
    names.add("sequences.embeddings.t_s.weight")
    for step in (0, 1, 2, 3, 5):
        assert taken["a"][step] == {name: changed[step][name] for name in names}
    assert not any(taken["a"][4].values())
    for name in names:
        assert 0 < len(changed[0][name]) < ROWS
        assert taken["b"][1][name] == changed[2][name] | changed[3][name]
        assert taken["a"][6][name] == set(range(ROWS))


def too_many(rank: int, world_size: int) -> None:
    dmp = sharded_model()
    for number in range(8):
        ChangedRows.of(dmp, f"consumer {number}")
    with pytest.raises(SetupError, match="for 8 consumers"):
        ChangedRows.of(dmp, "one more")


def test_more_consumers_than_bits() -> None:
    run_on_ranks(too_many, 1)
