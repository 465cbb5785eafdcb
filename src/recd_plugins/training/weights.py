"""Initial weights of sharded modules, set from whole tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recd_plugins.errors import SetupError
from recd_plugins.model.deferred_tables import FirstValues, Window, first_values_of
from recd_plugins.words import shortened

# Of a collision map of TorchRec, torchrec 1.6 to 1.9: the row ranges of its shards, which the map
# of a whole table does not have.
_OF_SHARDS = "._output_segments_tensor"


def first_weights(model: nn.Module) -> dict[str, Tensor | FirstValues]:
    """Copy the weights of a model before it is sharded, by name in its state dict.

    Tables made in ``deferred_tables()`` have none to copy yet.

    Raises:
        SetupError: such a table was set since, or the model is sharded already.
    """
    weights: dict[str, Tensor | FirstValues] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # A module takes other state (get_extra_state) along.
        if name.endswith("_extra_state"):
            continue
        if isinstance(tensor, ShardedTensor):
            raise SetupError(
                f"{name} is sharded already: call first_weights(model) before "
                "DistributedModelParallel, which has no first values of whole tables"
            )
        if (first := first_values_of(tensor)) is not None:
            first.check(tensor)
        weights[name] = tensor.detach().clone() if first is None else first
    return weights


def copy_weights(sharded: Mapping[str, Any], whole: Mapping[str, Tensor | FirstValues]) -> None:
    """Set every local shard of a sharded state dict from whole tensors of the same names.

    TorchRec drops initial weights when it shards an EmbeddingBagCollection on the CPU, so two
    plans of one model would start differently. Load ``sharded`` afterwards (``load_state_dict``):
    modules may have copies of rows, which follow their tables then. Tensors that only the sharded
    module has stay as they are.

    Raises:
        SetupError: ``whole`` lacks a table or is of another model, or a table's ``init_fn`` cannot
            be repeated.
    """
    if sharded and whole and not sharded.keys() & whole.keys():
        raise SetupError(
            f"the weights are of another model: they have {shortened(sorted(whole))}, and the "
            f"state dict {shortened(sorted(sharded))}"
        )
    with torch.no_grad():
        for name, target in sharded.items():
            if name.endswith(_OF_SHARDS):
                continue
            if name not in whole:
                if isinstance(target, ShardedTensor):
                    raise SetupError(
                        f"the sharded model has a table {name}, which the model has not: a sharded "
                        "module names its tables in state dicts as the module that it was made of"
                    )
                continue
            source = whole[name]
            if isinstance(source, FirstValues):
                source.fill(_windows(target))
            elif isinstance(target, ShardedTensor):
                for shard in target.local_shards():
                    window = tuple(
                        slice(start, start + size)
                        for start, size in zip(
                            shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True
                        )
                    )
                    shard.tensor.detach().copy_(source[window])
            else:
                target.detach().copy_(source)


def _windows(target: Any) -> list[Window]:
    """The parts of a table in a sharded state dict that this rank has."""
    if not isinstance(target, ShardedTensor):
        return [Window(target.detach(), 0, 0)]
    return [
        Window(shard.tensor.detach(), *shard.metadata.shard_offsets)
        for shard in target.local_shards()
    ]
