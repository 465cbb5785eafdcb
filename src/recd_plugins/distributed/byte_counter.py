"""What the collectives of this rank send, and how many ids its lookups take.

The conventions are those of docs/measuring.md.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.torchrec_internals import require_attributes
from recd_plugins.values.channels import CollectiveKind, resolve_group


@dataclass(frozen=True)
class Traffic:
    """What distinguishes one collective's bytes from another's.

    Attributes:
        kind: of collective.
        group: name of the process group.
        phase: whether autograd's backward pass called it.
        payload: integers are ids, lengths and sizes; floats are embeddings, gradients and weights.
    """

    kind: CollectiveKind
    group: str
    phase: Literal["forward", "backward"]
    payload: Literal["integers", "floats"]


#: Of the tags of sends: these are together an all-to-all, whose sizes who receives does not know.
EXCHANGE_TAG = 25_969

#: Operations that were seen and send nothing: almost all, so that they are to cost little.
_OTHERS: set[Any] = set()


class CollectiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that this rank sends to other ranks while the context is open.

    It can be opened again and adds up; ``reset`` starts anew. Collectives of the backward pass and
    those of DistributedDataParallel are seen, under a train pipeline too. It slows down every
    operation in it; closed it costs nothing.

    Example::

        with CollectiveBytes() as counter:
            loss = model(batch)
            loss.backward()
        counter.by_kind()["all_to_all"]

    Attributes:
        sent: bytes by what they were.
        calls: collectives by what they were; a waiting or synchronising one is not counted.
        to_ranks: bytes of all-to-alls and of sends, which need not be even, by the name of the
            process group and the place in it of the rank that gets them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[Traffic] = Counter()
        self.calls: Counter[Traffic] = Counter()
        self.to_ranks: Counter[tuple[str, int]] = Counter()

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.sent.values())

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind of collective, of those that were used."""
        return self.by("kind")

    def by(self, attribute: Literal["kind", "group", "phase", "payload"]) -> dict[str, int]:
        """Bytes by one attribute of ``Traffic``."""
        totals: Counter[str] = Counter()
        for traffic, num_bytes in self.sent.items():
            totals[getattr(traffic, attribute)] += num_bytes
        return dict(totals)

    def reset(self) -> None:
        """Forget everything."""
        self.sent.clear()
        self.calls.clear()
        self.to_ranks.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # TorchRec's reduce_scatter_tensor calls the functional one within; while this method runs
        # the mode is off, so that one is not counted again.
        if func not in _OTHERS:
            self._see(func, args, kwargs)
        return func(*args, **(kwargs or {}))

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        name = func._schema.name
        if (count := _COLLECTIVES.get(name)) is not None:
            names = (argument.name for argument in func._schema.arguments)
            self._count(*count, {**dict(zip(names, args, strict=False)), **(kwargs or {})})
        elif func.namespace in ("c10d", "_c10d_functional") and name not in _SILENT:
            # Counting is no reason to end a training run, and a low figure needs a reason.
            warnings.warn(
                f"CollectiveBytes leaves out {name}, which it does not know", stacklevel=3
            )
        else:
            _OTHERS.add(func)

    def _count(self, kind: CollectiveKind, sent: _Sent, arguments: dict[str, Any]) -> None:
        group = _group(arguments)
        exchange = arguments.get("tag") == EXCHANGE_TAG
        if exchange:
            kind = "all_to_all"
        num_bytes = sent(arguments, group.rank(), group.size())
        if not isinstance(num_bytes, int):
            num_bytes[group.rank()] = 0  # what stays
            for place, part in enumerate(num_bytes):
                self.to_ranks[group.group_name, place] += part
            num_bytes = sum(num_bytes)
        # Private, but autograd's own way to tell (torch 2.11 to 2.14); -1 outside of it.
        in_backward = torch._C._current_graph_task_id() != -1
        first = next(tensor for value in arguments.values() for tensor in _tensors(value))
        # Bytes are floats in 8 bits, or go to all alike.
        in_8_bits = first.dtype == torch.uint8 and kind == "all_to_all"
        floats = in_8_bits or first.is_floating_point()
        traffic = Traffic(
            kind,
            group.group_name,
            "backward" if in_backward else "forward",
            "floats" if floats else "integers",
        )
        self.sent[traffic] += num_bytes
        # Of sends of one exchange, that to the next rank counts.
        if not exchange or arguments["dst"] == (group.rank() + 1) % group.size():
            self.calls[traffic] += 1


@dataclass
class LookupIds:
    """How many ids the lookups of this rank took, after the input dist, by feature.

    A column-wise table takes an id once for each of its shards on this rank, as that many reads of
    memory happen.
    """

    per_feature: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All features."""
        return sum(self.per_feature.values())


@contextmanager
def lookup_ids(model: nn.Module) -> Iterator[LookupIds]:
    """Count the ids that enter the lookups of ``model``'s sharded embedding modules.

    On CUDA it waits for the device once a lookup.
    """
    ids = LookupIds()
    modules = [m for m in model.modules() if isinstance(m, ShardedEmbeddingModule)]
    before = [_tracker(module) for module in modules]
    for module, tracker in zip(modules, before, strict=True):
        module.post_lookup_tracker_fn = _Counting(ids, tracker)
    try:
        yield ids
    finally:
        for module, tracker in zip(modules, before, strict=True):
            module.post_lookup_tracker_fn = tracker


def _tracker(module: nn.Module) -> Any:
    # TorchRec's hook for its own trackers (1.6 to 1.9); one slot, which we share.
    require_attributes(module, "post_lookup_tracker_fn")
    return module.post_lookup_tracker_fn


def tracker_of(module: nn.Module) -> Callable[..., None] | None:
    """What looks on at the lookups of a sharded module, besides ``lookup_ids``."""
    tracker = _tracker(module)
    while isinstance(tracker, _Counting):
        tracker = tracker.before
    found: Callable[..., None] | None = tracker
    return found


class _Counting:
    def __init__(self, ids: LookupIds, before: Callable[..., None] | None) -> None:
        self._ids = ids
        self.before = before

    def __call__(self, features: KeyedJaggedTensor, *rest: Any) -> None:
        for name, num_ids in zip(features.keys(), features.length_per_key(), strict=True):
            self._ids.per_feature[name] += num_ids
        if self.before is not None:
            self.before(features, *rest)


# To all others; of all-to-alls what each rank gets, this one too.
_Sent = Callable[[dict[str, Any], int, int], int | list[int]]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    group: Any = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        group = resolve_group(group)
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return cast(dist.ProcessGroup, group)


def _to_each_by_split(input: str) -> _Sent:
    """Rows of one tensor, split over the ranks."""

    def sent(arguments: dict[str, Any], _: int, size: int) -> list[int]:
        tensor: Tensor = arguments[input]
        splits = arguments["input_split_sizes"]
        if not splits:
            return [_bytes(tensor) // size] * size
        row = _bytes(tensor) // max(1, tensor.shape[0])
        return [row * split for split in splits]

    return sent


def _to_each_by_list(input: str) -> _Sent:
    """One tensor for each rank."""
    return lambda arguments, _, __: [_bytes(tensor) for tensor in arguments[input]]


def _to_others_by_list(input: str) -> _Sent:
    """One tensor for each rank."""

    def sent(arguments: dict[str, Any], rank: int, size: int) -> int:  # noqa: ARG001
        tensors = arguments[input]
        nested = tensors and isinstance(tensors[0], list | tuple)
        return sum(
            _bytes(each) - _bytes(each[rank]) for each in (tensors if nested else [tensors]) if each
        )

    return sent


def _even_parts(input: str) -> _Sent:
    """All of a tensor but the part that stays."""
    return lambda arguments, _, size: _bytes(arguments[input]) * (size - 1) // size


def _to_each_other(input: str) -> _Sent:
    """The whole tensor to each of the other ranks."""
    return lambda arguments, _, size: _bytes(arguments[input]) * (size - 1)


def _reduced_and_gathered(input: str) -> _Sent:
    """As a reduce-scatter and an all-gather of the result."""
    return lambda arguments, _, size: 2 * _bytes(arguments[input]) * (size - 1) // size


def _from_root(input: str, root: str) -> _Sent:
    return lambda arguments, rank, size: (
        _bytes(arguments[input]) * (size - 1) if rank == arguments[root] else 0
    )


def _to_root(input: str) -> _Sent:
    return lambda arguments, rank, _: (
        0 if rank == arguments["root_rank"] else _bytes(arguments[input])
    )


def _to_one(arguments: dict[str, Any], _: int, size: int) -> list[int]:
    """To one rank."""
    sent = [0] * size
    sent[arguments["dst"]] = _bytes(arguments["tensors"])
    return sent


def _scattered(arguments: dict[str, Any], rank: int, size: int) -> int | list[int]:
    if rank != arguments["root_rank"]:
        return 0
    return _to_others_by_list("input_tensors")(arguments, rank, size)


_SILENT = {
    "c10d::barrier",
    "c10d::check_for_nan",
    "c10d::monitored_barrier_",
    "c10d::recv_",
    "c10d::recv_any_source_",
    "_c10d_functional::_wrap_tensor_autograd",
    "_c10d_functional::irecv",
    "_c10d_functional::wait_tensor",
}

# By the name in the operator's schema (torch 2.11 to 2.14).
_COLLECTIVES: dict[str, tuple[CollectiveKind, _Sent]] = {
    "c10d::alltoall_base_": ("all_to_all", _to_each_by_split("input")),
    "c10d::alltoall_": ("all_to_all", _to_each_by_list("input_tensors")),
    "_c10d_functional::all_to_all_single": ("all_to_all", _to_each_by_split("input")),
    "c10d::reduce_scatter_": ("reduce_scatter", _to_others_by_list("input_tensors")),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", _even_parts("input_tensor")),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", _even_parts("inputs")),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", _even_parts("input")),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", _even_parts("input")),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", _even_parts("inputs")),
    "torchrec::reduce_scatter_tensor": ("reduce_scatter", _even_parts("input")),
    "c10d::allgather_": ("all_gather", _to_each_other("input_tensors")),
    "c10d::_allgather_base_": ("all_gather", _to_each_other("input_tensor")),
    "c10d::allgather_coalesced_": ("all_gather", _to_each_other("input_list")),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", _to_each_other("inputs")),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", _to_each_other("input")),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", _to_each_other("input")),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", _to_each_other("inputs")),
    "torchrec::all_gather_into_tensor": ("all_gather", _to_each_other("shard")),
    "c10d::allreduce_": ("all_reduce", _reduced_and_gathered("tensors")),
    "c10d::allreduce_coalesced_": ("all_reduce", _reduced_and_gathered("tensors")),
    "_c10d_functional::all_reduce": ("all_reduce", _reduced_and_gathered("input")),
    "_c10d_functional::all_reduce_": ("all_reduce", _reduced_and_gathered("input")),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", _reduced_and_gathered("inputs")),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", _reduced_and_gathered("inputs")),
    "c10d::broadcast_": ("broadcast", _from_root("tensors", "root_rank")),
    "_c10d_functional::broadcast": ("broadcast", _from_root("input", "src")),
    "_c10d_functional::broadcast_": ("broadcast", _from_root("input", "src")),
    "c10d::reduce_": ("other", _to_root("tensors")),
    "c10d::gather_": ("other", _to_root("input_tensors")),
    "c10d::scatter_": ("other", _scattered),
    "c10d::send": ("other", _to_one),
    "_c10d_functional::isend": ("other", lambda arguments, _, __: _bytes(arguments["tensor"])),
}
