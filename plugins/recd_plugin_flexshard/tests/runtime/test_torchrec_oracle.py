"""TorchRec's own numerical check passes with tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.distributed.oracle_cases import FUSED, _Oracle, check_sequences
from torchrec.distributed.test_utils.test_model import TestMixedEmbeddingSparseArch

from recd_plugin_flexshard.runtime import (
    RowTiers,
    TieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
)

# Of TorchRec's three tables of 10, 20 and 30 rows, the last of which has none.
TIERS = {
    "table_0": RowTiers([9, 3], [0, 1, 5]),
    "table_1": RowTiers([], [19, 4, 2, 11, 7]),
}


class TieredSparseArch(TestMixedEmbeddingSparseArch):
    """TorchRec's model, whose EmbeddingCollection has tiers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain: Any = self.get_submodule("ec")
        self.add_module("ec", TieredEmbeddingCollection(plain, TIERS))


class RowWiseOnly(TieredEmbeddingCollectionSharder):
    """Leaves the planner one sharding type, as TorchRec's test sharders do."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]


def check_tensor_dicts(**arguments: Any) -> None:
    check_sequences(input_type="td", **arguments)


# Tables with optimizers of their own are in kernels of their own.
RATES = {f"table_{number}": (torch.optim.SGD, {"lr": 0.1 * (number + 1)}) for number in (0, 1)}


@pytest.mark.parametrize("local_size", [1, 2], ids=["2x1", "1x2"])
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (check_sequences, {}),
        (check_tensor_dicts, {}),
        (check_sequences, {"indices_dtype": torch.int32, "lengths_dtype": torch.int32}),
        (check_sequences, {"apply_optimizer_in_backward_config": RATES}),
    ],
    ids=["KeyedJaggedTensor", "TensorDict", "int32", "learning rates"],
)
def test_torchrecs_check(
    function: Callable[..., None], options: dict[str, Any], local_size: int
) -> None:
    _Oracle(function, local_size)._test_sharding(
        sharders=[RowWiseOnly(fused_params=dict(FUSED))],
        backend="gloo",
        world_size=2,
        local_size=local_size,
        model_class=TieredSparseArch,
        has_weighted_tables=False,
        **options,
    )
