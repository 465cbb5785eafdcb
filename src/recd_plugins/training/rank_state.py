"""What each rank of a run has of its own: random generators, and buffers that nobody sends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.distributed.table_report import outermost_sharded
from recd_plugins.errors import PluginError
from recd_plugins.generators import GeneratorState
from recd_plugins.interfaces import Plugin
from recd_plugins.plugin_call import plugin_call
from recd_plugins.training.agreement import from_rank_0, together
from recd_plugins.training.checkpoint_files.arrays import RANKS, read_arrays
from recd_plugins.training.checkpoint_files.errors import DamagedError
from recd_plugins.training.checkpoint_files.progress import Progress

_GENERATOR, _BUFFER = "generator ", "buffer "


def rank_state(dmp: DistributedModelParallel) -> dict[str, np.ndarray]:
    """The state of this rank: generators, and bytes of the buffers that differ from other ranks'.

    A collective call.
    """
    state = {_GENERATOR + name: each for name, each in GeneratorState.now().arrays().items()}
    for name, buffer in _own_buffers(dmp.module).items():
        state[_BUFFER + name] = _bytes(buffer).numpy()
    return state


def read_rank_state(checkpoint: Path) -> dict[str, np.ndarray]:
    """The state of this rank in a checkpoint; empty where that is of another number of ranks.

    Of an earlier version, too.

    Raises:
        DamagedError: the file is not as it was written.
    """
    arrays = read_arrays(checkpoint, RANKS)
    parted = {name: name.partition(" ") for name in arrays}
    if len({rank for rank, *_ in parted.values()}) != dist.get_world_size():
        return {}
    own = str(dist.get_rank())
    return {name: arrays[whole] for whole, (rank, _, name) in parted.items() if rank == own}


def of_all_ranks(states: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """States by rank, as ``read_rank_state`` finds them."""
    return {
        f"{rank} {name}": array
        for rank, state in enumerate(states)
        for name, array in state.items()
    }


def make_alike(tensors: Iterable[Tensor]) -> None:
    """Have tensors be rank 0's on every rank, as DistributedDataParallel does. A collective call.

    Args:
        tensors: equally large on every rank, in the same order.
    """
    for tensor in tensors:
        whole = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(whole, 0)
        _set(tensor, whole)


def check_positions(plugin: Plugin, progress: Progress) -> None:
    """Refuse a position of the reader that is no JSON, or another one on some rank.

    A collective call.

    Args:
        plugin: whose reader it is.
        progress: of this rank.

    Raises:
        PluginError: says what it is.
    """

    def text() -> str:
        with plugin_call(plugin, "state_dict of a reader"):
            return json.dumps(progress.reader, sort_keys=True, allow_nan=False)

    first, *others = together(text)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise PluginError(
                f"{plugin.title}: after step {progress.step} state_dict of a reader is "
                f"{other:.200} on rank {rank} and {first:.200} on rank 0; it is the same on every "
                "rank, so that another number of them can go on"
            )


def put_back(dmp: DistributedModelParallel, state: Mapping[str, np.ndarray]) -> None:
    """Have buffers be what this rank's were, and generators be where they were.

    Raises:
        DamagedError: ``state`` has a buffer that the model does not have so, or no generators.
    """
    put_back_generators(state)
    buffers = dict(_dense_buffers(dmp.module))
    for name, array in state.items():
        if not name.startswith(_BUFFER):
            continue
        buffer = buffers.get(name.removeprefix(_BUFFER))
        if buffer is None or buffer.nbytes != array.nbytes:
            raise DamagedError(f"{RANKS}: has a {name} that the model does not have so")
        _set(buffer, torch.from_numpy(array.copy()))


def put_back_generators(state: Mapping[str, np.ndarray]) -> None:
    """Have generators be where this rank's were; as they are where ``state`` has none.

    Raises:
        DamagedError: it has none that there could be.
    """
    arrays = {
        name.removeprefix(_GENERATOR): array
        for name, array in state.items()
        if name.startswith(_GENERATOR)
    }
    if not arrays:
        return
    try:
        GeneratorState.of_arrays(arrays).put_back()
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise DamagedError(f"{RANKS}: has no state of generators ({error})") from error


@contextmanager
def buffers_of_rank_0(dmp: DistributedModelParallel) -> Iterator[None]:
    """A context in which all ranks have rank 0's buffers, which are those of a checkpoint.

    Entering it is a collective call.
    """
    own = _own_buffers(dmp.module)
    before = {name: _bytes(buffer) for name, buffer in own.items()}
    first = from_rank_0(before)
    try:
        for name, buffer in own.items():
            _set(buffer, first[name])
        yield
    finally:
        for name, buffer in own.items():
            _set(buffer, before[name])


def _own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those of which some rank has another one than this."""
    buffers = dict(_dense_buffers(model))
    ranks = together(lambda: {name: _digest(buffer) for name, buffer in buffers.items()})
    return {
        name: buffer
        for name, buffer in buffers.items()
        if any(rank.get(name) != ranks[0].get(name) for rank in ranks)
    }


def _dense_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers of a checkpoint, besides those of sharded modules."""
    sharded = tuple(f"{path}." for path, _ in outermost_sharded(model))
    for path, module in model.named_modules():
        if f"{path}.".startswith(sharded):
            continue
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.removeprefix(f"{path}.") not in module._non_persistent_buffers_set:
                yield name, buffer


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(_bytes(tensor).numpy().data).digest()


def _bytes(tensor: Tensor) -> Tensor:
    """A copy in host memory, uint8."""
    return tensor.detach().cpu().contiguous().clone().reshape(-1).view(torch.uint8)


def _set(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values.view(tensor.dtype).view(tensor.shape))
