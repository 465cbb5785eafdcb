"""Counts the bytes that this rank sends and the ids that it looks up."""

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
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.interfaces.step_cost import CollectiveKind


@dataclass(frozen=True)
class Traffic:
    """Category of sent bytes: kind of collective, name of its process group, phase and payload.

    The phase is the forward or backward pass. The payload "integers" is ids, lengths and sizes;
    "floats" is embeddings, gradients and weights.
    """

    kind: CollectiveKind
    group: str
    phase: Literal["forward", "backward"]
    payload: Literal["integers", "floats"]


#: Tag of point-to-point sends that together form an all-to-all.
EXCHANGE_TAG = 25_969

#: Operations already known to send nothing. Nearly all operations are here, so the lookup must be
#: fast.
_OTHERS: set[Any] = set()


class CollectiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that this rank sends to other ranks while the context is open.

    Counts add up if the context is opened again. They include collectives of the backward pass, of
    DistributedDataParallel and of train pipelines. An open context slows down every operation.

    Example::

        with CollectiveBytes() as counter:
            loss = model(batch)
            loss.backward()
        counter.by_kind()["all_to_all"]

    ``sent`` has the bytes and ``calls`` the number of collectives, except barriers and waits, of
    each ``Traffic`` category.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[Traffic] = Counter()
        self.calls: Counter[Traffic] = Counter()

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def by_kind(self) -> dict[str, int]:
        """Return a dict from collective, such as "all_to_all", to its number of bytes."""
        return self.by("kind")

    def by(self, attribute: Literal["kind", "group", "phase", "payload"]) -> dict[str, int]:
        """Return a dict from each value of a ``Traffic`` attribute to its number of bytes."""
        totals: Counter[str] = Counter()
        for traffic, num_bytes in self.sent.items():
            totals[getattr(traffic, attribute)] += num_bytes
        return dict(totals)

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
            # Warn instead of ending the run, so that users know why counts are low.
            warnings.warn(
                f"CollectiveBytes does not support the collective {name!r}, so its bytes are "
                "missing from the counts.",
                stacklevel=3,
            )
        else:
            _OTHERS.add(func)

    def _count(
        self, kind: CollectiveKind, input: str, rule: str, arguments: dict[str, Any]
    ) -> None:
        group = _group(arguments)
        exchange = arguments.get("tag") == EXCHANGE_TAG
        if exchange:
            kind = "all_to_all"
        num_bytes = _sent_bytes(rule, arguments[input], arguments, group.rank(), group.size())
        # A private function (torch 2.11 to 2.14) that returns -1 outside the backward pass.
        in_backward = torch._C._current_graph_task_id() != -1
        first = next(tensor for value in arguments.values() for tensor in _tensors(value))
        # uint8 data in an all-to-all is embeddings quantized to 8 bits.
        in_8_bits = first.dtype == torch.uint8 and kind == "all_to_all"
        floats = in_8_bits or first.is_floating_point()
        traffic = Traffic(
            kind,
            group.group_name,
            "backward" if in_backward else "forward",
            "floats" if floats else "integers",
        )
        self.sent[traffic] += num_bytes
        # Count one call per exchange: the send to the next rank.
        if not exchange or arguments["dst"] == (group.rank() + 1) % group.size():
            self.calls[traffic] += 1


@dataclass
class LookupIds:
    """Number of ids looked up on this rank per feature; each column shard counts them again."""

    per_feature: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.per_feature.values())


@contextmanager
def lookup_ids(model: nn.Module) -> Iterator[LookupIds]:
    """Count the ids that ``model`` looks up; on CUDA, each lookup synchronizes the device."""
    ids = LookupIds()
    modules: list[Any] = [m for m in model.modules() if isinstance(m, ShardedEmbeddingModule)]
    before = [module.post_lookup_tracker_fn for module in modules]  # TorchRec's, one slot
    for module, tracker in zip(modules, before, strict=True):
        module.post_lookup_tracker_fn = _Counting(ids, tracker)
    try:
        yield ids
    finally:
        for module, tracker in zip(modules, before, strict=True):
            module.post_lookup_tracker_fn = tracker


def tracker_of(module: nn.Module) -> Callable[..., None] | None:
    """Return the user's ``post_lookup_tracker_fn``, even while ``lookup_ids`` replaces it."""
    tracker: Any = module.post_lookup_tracker_fn
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


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists or tuples."""
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
        # Private, but used by torch's functional collectives (2.11 to 2.14).
        group = vars(distributed_c10d)["_resolve_process_group"](group)
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return cast(dist.ProcessGroup, group)


def _sent_bytes(rule: str, value: Any, arguments: Mapping[str, Any], rank: int, size: int) -> int:
    """Return the total number of bytes that this rank sends to other ranks in a collective."""
    total = _bytes(value)
    match rule:
        case "split":
            if not (splits := arguments["input_split_sizes"]):
                return total - total // size
            return total - total // max(1, value.shape[0]) * int(splits[rank])
        case "listed":  # a tensor for each rank, or several such lists
            lists = value if value and isinstance(value[0], list | tuple) else [value]
            return sum(_bytes(each) - _bytes(each[rank]) for each in lists if each)
        case "even":  # one part stays
            return total * (size - 1) // size
        case "whole":
            return total * (size - 1)
        case "reduced":  # a reduce-scatter and an all-gather
            return 2 * total * (size - 1) // size
        case "from_root":
            root = arguments.get("root_rank", arguments.get("src"))
            return total * (size - 1) if rank == root else 0
        case "to_root":
            return 0 if rank == arguments["root_rank"] else total
        case _:  # a send
            return total if rank != arguments["dst"] else 0


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

# Kind, input and rule, by the name in the operator's schema (torch 2.11 to 2.14).
_COLLECTIVES: dict[str, tuple[CollectiveKind, str, str]] = {
    "c10d::alltoall_base_": ("all_to_all", "input", "split"),
    "c10d::alltoall_": ("all_to_all", "input_tensors", "listed"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input", "split"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors", "listed"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor", "even"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input", "even"),
    "torchrec::reduce_scatter_tensor": ("reduce_scatter", "input", "even"),
    "c10d::allgather_": ("all_gather", "input_tensors", "whole"),
    "c10d::_allgather_base_": ("all_gather", "input_tensor", "whole"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input", "whole"),
    "torchrec::all_gather_into_tensor": ("all_gather", "shard", "whole"),
    "c10d::allreduce_": ("all_reduce", "tensors", "reduced"),
    "_c10d_functional::all_reduce": ("all_reduce", "input", "reduced"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input", "reduced"),
    "c10d::broadcast_": ("broadcast", "tensors", "from_root"),
    "c10d::reduce_": ("other", "tensors", "to_root"),
    "c10d::send": ("other", "tensors", "to_one"),
}
