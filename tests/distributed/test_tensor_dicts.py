"""Features that come as a TensorDict, which TorchRec's modules take, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.sharded import CPU, SGD, bags, everyone, exact_sharders, one_rank, plan_of, sequences
from torch import Tensor

IDS = {"a": [[1, 2], [3]], "b": [[4], [5, 6]]}


def batch(names: str) -> TensorDict:
    lists = {name: [torch.tensor(row) for row in IDS[name]] for name in names}
    return TensorDict(
        {
            name: torch.nested.nested_tensor(rows, layout=torch.jagged)
            for name, rows in lists.items()
        }
    )


@pytest.mark.parametrize("kind", [bags, sequences])
def test_their_order_may_change(kind: Any) -> None:
    """TorchRec looks each feature up in the table of another, and says nothing."""
    with one_rank():
        module = kind(*IDS)
        (sharder,) = (s for s in exact_sharders(SGD) if s.module_type is type(module))
        plan = plan_of(module, "row_wise", sharder, 1, 1)
        sharded = sharder.shard(module, plan, everyone(), CPU)

        def vectors(names: str) -> list[Tensor]:
            found = sharded(batch(names)).wait()
            return [found[name] if kind is bags else found[name].values() for name in IDS]

        first, later = vectors("ab"), vectors("ba")
        assert not torch.equal(*first)
        assert all(map(torch.equal, first, later))
