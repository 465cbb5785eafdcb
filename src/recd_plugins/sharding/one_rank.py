"""Input dist of a process group with one rank: ids stay in their tensors.

TorchRec (1.6 to 1.9) sends the sizes to itself, reads them back from the device and permutes ids
into the order that they already have.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# Options of TorchRec's row-wise input dists that change ids or weights even for one rank.
_CHANGES = ("_has_feature_processor", "_need_pos", "_has_multiple_blocks_per_shard")


def keep_ids_of_one_rank(input_dists: list[nn.Module]) -> None:
    """Replace input dists for one rank, in the given list, by input dists without communication."""
    for number, each in enumerate(input_dists):
        exchange: Any = getattr(each, "_dist", None)  # data-parallel tables have none
        changes = any(getattr(each, name, False) for name in _CHANGES)
        if exchange is not None and exchange._pg.size() == 1 and not changes:
            input_dists[number] = _LocalInputDist()


class _LocalInputDist(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        return NoWait(_LocalIds(features))


class _LocalIds(KJTAllToAllTensorsAwaitable):
    """Ids that have arrived, with the fields that TorchRec copies to the sharding context."""

    def __init__(self, features: KeyedJaggedTensor) -> None:
        Awaitable.__init__(self)
        self._workers, self._input, self._recat = 1, features, None
        self._input_splits = self._output_splits = {"values": [features.values().numel()]}
        self._stride_per_rank = None if features.variable_stride_per_key() else [features.stride()]

    def _wait_impl(self) -> KeyedJaggedTensor:
        return self._input
