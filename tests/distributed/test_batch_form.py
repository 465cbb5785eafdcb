"""Forms of a batch that a module takes."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.batch_form import refuse_inverse_indices
from recd_plugins.errors import ExactnessError

PARTS = {
    "stride_per_key_per_rank": [[3]],
    "inverse_indices": (["a"], torch.tensor([[0, 1, 2]])),
}


def features(*parts: str) -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 1, 2])
    return KeyedJaggedTensor(
        ["a"], torch.arange(5), lengths=lengths, **{part: PARTS[part] for part in parts}
    )


def test_an_embedding_collection_takes_a_plain_batch() -> None:
    refuse_inverse_indices(features())


@pytest.mark.parametrize("parts", [[part] for part in PARTS] + [list(PARTS)], ids=" and ".join)
def test_it_takes_neither_part_of_a_deduplicated_one(parts: list[str]) -> None:
    with pytest.raises(ExactnessError, match="loses its gradient or its inverse"):
        refuse_inverse_indices(features(*parts))


def test_where_a_variable_batch_is_taken_inverse_indices_come_with_it() -> None:
    refuse_inverse_indices(features(*PARTS), allow_variable_batch=True)
    with pytest.raises(ExactnessError):
        refuse_inverse_indices(features("inverse_indices"), allow_variable_batch=True)
