"""State that differs between ranks: random generators and dense buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.interfaces.model_tables import outermost_sharded
from recd_plugins.model.deferred_tables import FirstValues, Window, first_values_of
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.generators import GeneratorState
from recd_plugins.runtime.rank_agreement import from_rank_0
from recd_plugins.training.checkpoint_files import RANKS, DamagedError, read_arrays

_GENERATOR, _BUFFER = "generator ", "buffer "


def rank_state(dmp: DistributedModelParallel) -> dict[str, np.ndarray]:
    """Return the state of this rank's random generators and dense buffers, as arrays."""
    state = {_GENERATOR + name: each for name, each in GeneratorState.now().arrays().items()}
    for name, buffer in _dense_buffers(dmp.module):
        state[_BUFFER + name] = _bytes(buffer).numpy()
    return state


def read_rank_state(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return this rank's state in a checkpoint; empty if the number of ranks has changed."""
    arrays = read_arrays(checkpoint, RANKS)
    parted = {name: name.partition(" ") for name in arrays}
    if len({rank for rank, *_ in parted.values()}) != dist.get_world_size():
        return {}
    own = str(dist.get_rank())
    return {name: arrays[whole] for whole, (rank, _, name) in parted.items() if rank == own}


def broadcast_state(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's tensors to every rank. All ranks must call this."""
    for tensor in tensors:
        whole = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(whole, 0)
        _set(tensor, whole)


def put_back(dmp: DistributedModelParallel, state: Mapping[str, np.ndarray]) -> None:
    """Restore this rank's buffers and random generators from ``state``."""
    put_back_generators(state)
    buffers = dict(_dense_buffers(dmp.module))
    for name, array in state.items():
        if not name.startswith(_BUFFER):
            continue
        buffer = buffers.get(name.removeprefix(_BUFFER))
        if buffer is None or buffer.nbytes != array.nbytes:
            raise DamagedError(
                f"{RANKS}: the size of {name} differs from the model. Use another checkpoint."
            )
        _set(buffer, torch.from_numpy(array.copy()))


def put_back_generators(state: Mapping[str, np.ndarray]) -> None:
    """Restore this rank's random generators, if ``state`` contains their states."""
    if arrays := {
        name.removeprefix(_GENERATOR): array
        for name, array in state.items()
        if name.startswith(_GENERATOR)
    }:
        GeneratorState.of_arrays(arrays).put_back()


@contextmanager
def buffers_of_rank_0(dmp: DistributedModelParallel) -> Iterator[None]:
    """Use rank 0's buffers on all ranks in this context. All ranks must enter it."""
    own = dict(_dense_buffers(dmp.module))
    before = {name: _bytes(buffer) for name, buffer in own.items()}
    first = from_rank_0(before)
    try:
        for name, buffer in own.items():
            _set(buffer, first[name])
        yield
    finally:
        for name, buffer in own.items():
            _set(buffer, before[name])


def _dense_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of persistent buffers outside of sharded modules."""
    sharded = tuple(f"{path}." for path, _ in outermost_sharded(model))
    for path, module in model.named_modules():
        if f"{path}.".startswith(sharded):
            continue
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.removeprefix(f"{path}.") not in module._non_persistent_buffers_set:
                yield name, buffer


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a copy in host memory, uint8 ``[nbytes]``."""
    return tensor.detach().cpu().contiguous().clone().reshape(-1).view(torch.uint8)


def _set(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


# Buffers of TorchRec's collision maps (torchrec 1.6 to 1.9) with the row ranges of shards. The
# collision map of an unsharded table does not have them.
_OF_SHARDS = "._output_segments_tensor"


def first_weights(model: nn.Module) -> dict[str, Tensor | FirstValues]:
    """Return a dict from name to a copy of each weight of a model that is not yet sharded.

    For tables created in ``deferred_tables()``, the dict has a FirstValues that can draw the values
    later.

    Raises:
        SetupError: a deferred table was modified, or the model is already sharded.
    """
    weights: dict[str, Tensor | FirstValues] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith("_extra_state"):
            continue
        if isinstance(tensor, ShardedTensor):
            raise SetupError(
                f"parameter {name!r} is already sharded. Call first_weights(model) before "
                "DistributedModelParallel."
            )
        if (first := first_values_of(tensor)) is not None:
            first.check(tensor)
        weights[name] = tensor.detach().clone() if first is None else first
    return weights


def copy_weights(sharded: Mapping[str, Any], whole: Mapping[str, Tensor | FirstValues]) -> None:
    """Copy unsharded tensors into the local shards of a sharded state dict, matched by name.

    TorchRec drops initial weights when it shards an EmbeddingBagCollection on the CPU. Initial
    weights would therefore depend on the plan. Call ``load_state_dict(sharded)`` afterwards,
    because some modules have copies of rows. Tensors that are only in ``sharded`` stay unchanged.

    Raises:
        SetupError: ``whole`` lacks a table or belongs to another model, or a table's ``init_fn`` is
            not repeatable.
    """
    if sharded and whole and not sharded.keys() & whole.keys():
        raise SetupError(
            f"the weights belong to another model: none of their names, such as {min(whole)!r}, is "
            "in the sharded model. Pass the first_weights() of the same model."
        )
    with torch.no_grad():
        for name, target in sharded.items():
            if name.endswith(_OF_SHARDS):
                continue
            if name not in whole:
                if isinstance(target, ShardedTensor):
                    raise SetupError(
                        f"table {name!r} of the sharded model is missing from the unsharded "
                        "weights. Pass the first_weights() of the same model."
                    )
                continue
            source = whole[name]
            shards = [(target.detach(), [0] * target.dim())]
            if isinstance(target, ShardedTensor):
                shards = [
                    (shard.tensor.detach(), shard.metadata.shard_offsets)
                    for shard in target.local_shards()
                ]
            if isinstance(source, FirstValues):
                source.fill([Window(tensor, *offsets) for tensor, offsets in shards])
                continue
            for tensor, offsets in shards:
                window = source
                for dim, (start, size) in enumerate(zip(offsets, tensor.shape, strict=True)):
                    window = window.narrow(dim, start, size)
                tensor.copy_(window)
