"""Rows of tiers as a trainer's codecs send them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import CommOp

from recd_plugin_flexshard.runtime.touched import Wire
from recd_plugins.api import SetupError


def codecs(kind: CommType) -> dict[str, Any]:
    both = get_qcomm_codecs(QCommsConfig(forward_precision=kind, backward_precision=kind))
    return {CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name: both}


@pytest.mark.parametrize(
    ("kind", "row"), [(CommType.FP16, 32), (CommType.BF16, 32), (CommType.INT8, 40)]
)
@pytest.mark.parametrize("num_rows", [0, 5])
def test_rows_travel_one_by_one(kind: CommType, row: int, num_rows: int) -> None:
    wire, rows = Wire(codecs(kind), 32), torch.rand(num_rows, 32)
    encoded = wire.gradients.encode(rows)
    assert encoded.shape == (num_rows, row)
    # In another order, as ranks choose among them.
    decoded = wire.gradients.decode(encoded.flip(0))
    assert torch.allclose(decoded, rows.flip(0), atol=4e-3)


def test_a_block_of_several_rows_is_refused() -> None:
    """TorchRec's int8 has one scale for 32 scalars, which may be those of two rows."""
    with pytest.raises(SetupError, match=r"rows of tiers have 16 scalars, and .* blocks of 32"):
        Wire(codecs(CommType.INT8), 16)
