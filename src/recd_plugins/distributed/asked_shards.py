"""Tensors of a state dict that say when somebody asks for their shards.

In TorchRec the tensors of a state dict are the tables, whenever it was taken. Where a table has
rows elsewhere, in copies or in a cache, somebody has to know that its tensors are read or written:
a trainer may take a state dict once, and save it or load into it many steps later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard

from recd_plugins.distributed.torchrec_internals import require_attributes


class AskedShardedTensor(ShardedTensor):
    """A ShardedTensor that calls a function whenever its shards are asked for.

    Copies, and what is pickled, are plain ShardedTensors.
    """

    # Private, seen in torch 2.13: what local_shards, gather, cpu, clone and pickling read.
    @property
    def _local_shards(self) -> list[Shard]:
        self.__dict__["_asked_for"]()
        shards: list[Shard] = self.__dict__["_local_shards"]
        return shards

    @_local_shards.setter
    def _local_shards(self, shards: list[Shard]) -> None:
        self.__dict__["_local_shards"] = shards

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As of a ShardedTensor: who reads a checkpoint may not have this class."""
        plain = self.detach()  # of the same memory
        assert type(plain) is ShardedTensor
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def tell_when_asked(module: Any, asked_for: Mapping[str, Callable[[], None]]) -> None:
    """Have a function called whenever shards of a table in a state dict are asked for.

    Those of its weights and of its optimizer state, in dicts taken before or after.

    Args:
        module: a sharded collection.
        asked_for: by table.
    """
    states = module.fused_optimizer.state_dict()["state"]
    for name, weights in module.state_dict().items():
        function = asked_for.get(name.partition(".")[2].removesuffix(".weight"))
        if function is not None:
            for tensor in (weights, *states.get(name, {}).values()):
                _tell(tensor, function)


def _tell(tensor: Any, function: Callable[[], None]) -> None:
    if isinstance(tensor, ShardedTensor):  # not a DTensor, of which shards are asked otherwise
        require_attributes(tensor, "_local_shards")
        tensor.__dict__["_asked_for"] = function
        tensor.__class__ = AskedShardedTensor
