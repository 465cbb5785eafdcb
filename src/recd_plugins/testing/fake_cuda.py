"""A CUDA device without a GPU: tensors on ``cuda:0`` that compute on the CPU.

The CUDA branches of TorchRec, FBGEMM's Python code and recd-plugins run on this device from end to
end, with fake streams, events and pinned memory. ``host_counts`` counts the operators, kernel
launches, copies and waits (syncs) of training steps, and their source lines. Times mean nothing.
"""

from __future__ import annotations

import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "HostCounts",
    "HostEvent",
    "efficient_attention",
    "fake_cuda",
    "host_counts",
    "mark_phases",
]

_MEMORY = 80 << 30
_NAME = "fake_device"  # the device type that C++ code sees
#: Operators that accept tensors of two devices on CUDA, too: copies, and indices from the CPU.
_MIXED = {
    *("aten::copy_", "aten::_to_copy", "aten::index"),
    *("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"),
}
#: Operators that launch no kernel, in addition to views.
_NO_KERNELS = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "resize_"),
    *("detach", "lift_fresh", "_unsafe_view", "_reshape_alias", "alias", "view", "_lazy_clone"),
    *("is_pinned", "_pin_memory", "record_stream", "_local_scalar_dense", "is_same_size"),
    *("_wrap_tensor_autograd", "wait_tensor", "sym_size", "_assert_async"),
}
#: Approximate kernel launches of operators with more than one.
_KERNELS = {
    "sort": 5,
    "_unique2": 10,
    "unique_consecutive": 6,
    "nonzero": 4,
    "bincount": 4,
    "segment_reduce": 2,
    "_segment_reduce_backward": 3,
    "get_unique_indices": 7,
    "lru_cache_populate": 14,
    "lfu_cache_populate": 14,
    "lxu_cache_locking_counter_decrement": 3,
}
#: Operators of FBGEMM's UVM cache without a CPU kernel. Fake lookups bypass the cache, so these
#: operators do nothing.
_OF_UVM_CACHE = {
    *("lru_cache_populate", "lfu_cache_populate", "lxu_cache_locking_counter_decrement"),
    "lxu_cache_flush",
}
#: Operators whose result has a size or a value that the host must wait for.
_WAITS = {
    *("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive"),
    *("masked_select", "bincount", "equal", "is_nonzero"),
}
#: Approximate kernel launches, forward and backward, of functions with a gradient. The first name
#: that starts the function's name counts; other functions launch one kernel each way.
_FUNCTIONS = {
    "split_embedding_codegen_lookup": (1, 14),
    "batch_index_select_dim0": (2, 14),
    "keyed_jagged_index_select_dim1": (4, 4),
    "jagged_index_select": (5, 3),
    "scaled_dot_product_attention": (1, 3),
    "aten::_efficient_attention_forward": (1, 3),
    "": (1, 1),
}
#: Functions that the CPU runs with other arguments, or that always read a size from the device.
_ALWAYS = (
    *("scaled_dot_product_attention", "aten::_efficient_attention_forward"),
    *(f"fbgemm::{name}" for name in list(_FUNCTIONS)[:4] if name != "batch_index_select_dim0"),
)
_CODE = ("/recd_plugin", "/torchrec/", "/fbgemm_gpu/", "/torch/optim/", "/torch/nn/parallel/")
_OTHER = "other"


class HostEvent(NamedTuple):
    """One kind of event in a step.

    Attributes:
        phase: ``backward``, a phase of ``mark_phases``, or ``other``.
        what: ``dispatched``, ``launch``, ``sync`` or ``copy`` (not waited for).
        kind: operator or function. For copies, the direction and whether the memory is pinned.
        place: ``file:line function`` of the innermost frame in TorchRec, FBGEMM, torch.optim or
            recd-plugins, or the autograd node. Empty for ``dispatched``.
        stream: name of the current stream; ``default`` for the default stream.
    """

    phase: str
    what: str
    kind: str
    place: str
    stream: str


class HostCounts(Counter[HostEvent]):
    """Number of times that each event happened."""

    def by_phase(self, what: str, steps: int = 1) -> dict[str, float]:
        """Return the number of events per step and phase, and in ``all`` phases."""
        found: Counter[str] = Counter()
        for event, count in self.items():
            if event.what == what:
                found[event.phase] += count
                found["all"] += count
        return {phase: round(count / steps, 2) for phase, count in found.items()} or {"all": 0.0}

    def add(self, what: str, kind: str, count: int = 1) -> None:
        """Count events at the caller's place, phase and stream."""
        if count:
            phase = "backward" if _in_backward() else _phases[-1]
            place = "" if what == "dispatched" else _place()
            self[HostEvent(phase, what, kind, place, _streams[-1].name)] += count


_counts: HostCounts | None = None
_phases = [_OTHER]


@contextmanager
def host_counts() -> Iterator[HostCounts]:
    """Count what happens in the context on the fake device. Yields the counts."""
    global _counts
    _counts = found = HostCounts()
    try:
        yield found
    finally:
        _counts = None


def mark_phases(owner: object, methods: Mapping[str, str]) -> None:
    """Wrap methods of an object, so that events in them count for a phase.

    Args:
        owner: for example a train pipeline.
        methods: phase, keyed by method name. Names that the object lacks are ignored.
    """
    for name, phase in methods.items():
        if hasattr(owner, name):
            setattr(owner, name, _in_phase(phase)(getattr(owner, name)))


@contextmanager
def _in_phase(phase: str) -> Iterator[None]:
    _phases.append(phase)
    try:
        yield
    finally:
        _phases.pop()


def _kernels_of(operator: Any) -> int:
    namespace, _, name = operator._schema.name.partition("::")
    if name in _NO_KERNELS or namespace in ("prim", "profiler") or operator.is_view:
        return 0
    return _KERNELS.get(name, 1)


def _count(what: str, kind: str, count: int = 1) -> None:
    if what == "sync" and _captured is not None:
        raise RuntimeError(f"{kind} waits for the device while a CUDA graph is captured.")
    if _counts is not None:
        _counts.add(what, kind, count)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _place() -> str:
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        found = next((at for mark in _CODE if (at := path.rfind(mark)) >= 0), -1)
        if found >= 0 and path != __file__:
            return f"{path[found + 1 :]}:{line} {frame.f_code.co_name}"
    if _in_backward():
        node = torch._C._current_autograd_node()
        return f"autograd {node.name() if node is not None else ''}"
    return "?"


def _nothing(*_: Any, **__: Any) -> None: ...


class _Event:
    record = wait = _nothing

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        _count("sync", f"{type(self).__name__[1:]}.synchronize")


class _Stream(_Event):
    wait_stream = wait_event = _nothing

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, number = _device, next(_created)
        self.name = f"stream {number}" if number else "default"

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        _streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams.pop()


class _Graph:
    """CUDA graph that computes its operators again in ``replay``, and counts as one launch."""

    def __init__(self) -> None:
        self._operators: list[Any] = []

    @staticmethod
    @contextmanager
    def capture(graph: _Graph, **_: Any) -> Iterator[None]:
        global _captured
        _captured = graph._operators
        try:
            yield
        finally:
            _captured = None

    def pool(self) -> int:
        return id(self)

    def replay(self) -> None:
        _count("launch", "graph")
        with _disable_current_modes(), torch.no_grad():
            for func, args, kwargs, results in self._operators:
                found = _tensors(func(*args, **kwargs))
                for kept, again in zip(_tensors(results), found, strict=True):
                    kept.copy_(again)


#: Operators of the CUDA graph that is being captured, with their arguments and results.
_captured: list[Any] | None = None
_torch_empty = torch.empty
_device = torch.device("cuda", 0)
_created = itertools.count()  # numbers of streams
_default = _Stream()
#: Stack of entered streams, from the default stream to the current one.
_streams = [_default]
#: Pinned tensors keyed by the address of their storage. Referenced, so that no address is reused.
_pinned: dict[int, Tensor] = {}
#: Addresses of all-reduced storages. DistributedDataParallel copies gradients from gloo's results,
#: which are CPU tensors with the storage of its buckets.
_buckets: set[int] = set()


class _OnCuda(Tensor):
    """A tensor on the fake device. ``stored`` is a CPU tensor with the values."""

    stored: Tensor
    record_stream = _nothing

    @staticmethod
    def __new__(cls, stored: Tensor) -> _OnCuda:
        made: _OnCuda = Tensor._make_wrapper_subclass(
            cls,
            stored.shape,
            strides=stored.stride(),
            storage_offset=stored.storage_offset(),
            dtype=stored.dtype,
            device=torch.device(_NAME, 0),
            requires_grad=stored.requires_grad,
        )
        made.stored = stored.detach()
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.stored}, device={_device}"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def get_device(self) -> int:
        return _device.index

    def as_subclass(self, _: type) -> Any:  # TorchRec slices tables
        return torch.nn.Parameter(self.detach())

    def data_ptr(self) -> int:
        return self.stored.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.stored.untyped_storage()

    def tolist(self) -> Any:
        _count("sync", "tolist")
        return self.stored.tolist()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "_qualified_op_name", getattr(func, "__name__", "")))
        with torch._C.DisableTorchFunctionSubclass():
            if name == "zeros" and "out" in kwargs:  # FBGEMM's tables in UVM
                return func(*args, dtype=kwargs.pop("out").dtype, **kwargs)
            if name.startswith(_ALWAYS) or (
                name.startswith("fbgemm::")
                and torch.is_grad_enabled()
                and any(each.requires_grad for each in _tensors(args, kwargs))
            ):
                return _differentiable(func, name.removeprefix("fbgemm::"), args, kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


class _Factories(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that creates tensors on the fake device if ``device=`` names it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        on_cuda = any(isinstance(each, _OnCuda) for each in _tensors(args, kwargs))
        if on_cuda or _is_fake(kwargs.get("device")):
            return _computed(func, args, kwargs)
        _count("dispatched", func._schema.name)
        pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        return _remember_pinned(result) if pinned else result


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the stored tensors, and count it."""
    name, device = func._schema.name, kwargs.get("device")
    tensors = _tensors(args, kwargs)
    # A tensor without dimensions is a number to CUDA's kernels.
    strange = [each for each in tensors if each.dim() and not isinstance(each, _OnCuda)]
    aten = func.namespace == "aten"
    if strange and len(strange) < len(tensors) and name not in _MIXED and aten:
        raise RuntimeError(
            f"{func} got tensors on {_device}, and tensors on {strange[0].device} of shapes "
            f"{[tuple(each.shape) for each in strange]}. Move all tensors to one device."
        )
    if name == "aten::_to_copy" and _is_fake(device):
        source = args[0]
        if isinstance(source, _OnCuda) and kwargs.get("dtype") in (None, source.dtype):
            return _OnCuda(source.stored)  # C++ code took this for another device
    if name == "c10d::allreduce_":
        _buckets.update(each.data_ptr() for each in tensors)
    _count_operator(func, name, args, kwargs)
    if name.removeprefix("fbgemm::") in _OF_UVM_CACHE:
        return None
    inner = {**kwargs, "device": torch.device("cpu")} if device is not None else dict(kwargs)
    inner.pop("pin_memory", None)
    stored = tree_map(_stored, args), tree_map(_stored, inner)
    result = func(*stored[0], **stored[1])
    if _captured is not None:
        _captured.append((func, *stored, result))
    if not aten or name == "aten::set_":  # FBGEMM's operators and collectives return new wrappers
        return tree_map(partial(_put, of={id(_stored(each)): each for each in tensors}), result)
    if name == "aten::copy_":
        return args[0]
    if device is not None and not _is_fake(device):
        return result
    placed = tree_map(_put, result)
    return return_and_correct_aliasing(func, args, kwargs, placed)  # type: ignore[no-untyped-call]


def _count_operator(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _counts is None and _captured is None:
        return
    _count("dispatched", name)
    into = args[0] if name == "aten::copy_" else None
    if into is not None or (name == "aten::_to_copy" and kwargs.get("device") is not None):
        source = args[1] if into is not None else args[0]
        to_device = _is_fake(kwargs["device"]) if into is None else isinstance(into, _OnCuda)
        if to_device != isinstance(source, _OnCuda):
            _count_copy(source if to_device else into, to_device, args[2:], kwargs)
            return
    short = name.removeprefix("aten::")
    by_mask = short.startswith(("index", "_index_put")) and any(
        each.dtype in (torch.bool, torch.uint8) for each in _tensors(args[1])
    )
    repeats = short == "repeat_interleave" and kwargs.get("output_size") is None
    if short in _WAITS or by_mask or repeats:
        _count("sync", short)
    _count("launch", name, _kernels_of(func))


def _count_copy(on_host: Any, to_device: bool, more: Any, kwargs: dict[str, Any]) -> None:
    """Count a copy between ``on_host``, a CPU tensor (None: not yet created), and the device."""
    address = 0 if on_host is None else on_host.untyped_storage().data_ptr()
    if to_device and address in _buckets:
        _count("launch", "copy from bucket")
        return
    kind = "copy to device" if to_device else "copy to host"
    kind = f"{kind}, {'pinned' if address in _pinned else 'pageable'}"
    waits = not (more[0] if more else kwargs.get("non_blocking"))
    _count("sync" if waits else "copy", kind)
    _count("launch", kind)


def _differentiable(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that has no gradient on the fake device, with the CPU's gradient."""
    if _captured is not None:
        # A replay calls recorded operators, but this path needs autograd. Dense layers have none.
        raise NotImplementedError(f"fake_cuda: {name} in a CUDA graph")
    forward, backward = next(c for start, c in _FUNCTIONS.items() if name.startswith(start))
    leaves, spec = tree_flatten((args, kwargs))
    if name == "scaled_dot_product_attention" and kwargs.get("attn_mask") is not None:
        forward += 4  # fills, converts and pads the mask
    if "jagged_index_select" in name and not isinstance(leaves[-1], int):
        _count("sync", name)  # reads the number of selected values
    _count("dispatched", name)
    _count("launch", name, forward)

    def run(inputs: list[Any]) -> tuple[Any, list[Tensor]]:
        inner_args, inner = tree_unflatten(inputs, spec)
        trained = [each for each in _tensors(inputs) if each.requires_grad]
        if name.startswith("split_embedding_codegen_lookup"):
            trained += _to_host_kernel(inner)
        return _ON_CPU.get(name, func)(*inner_args, **inner), trained

    return _Nested.apply(run, name, backward, *leaves)  # type: ignore[no-untyped-call]


def _to_host_kernel(arguments: dict[str, Any]) -> list[Tensor]:
    """Replace the arguments of FBGEMM's CUDA lookup by those of its CPU lookup."""
    for name in ("weights", "momentum1", "momentum2", "row_counter", "prev_iter"):
        if arguments.get(name) is not None:
            on_device, managed, *layout = arguments[name][:4]
            if on_device.numel() and managed.numel():
                # FBGEMM's CPU lookup has one tensor, so it cannot stand in for such a CUDA lookup.
                raise NotImplementedError("fake_cuda: one lookup has tables on the device and UVM.")
            arguments[name] = [on_device if on_device.numel() else managed, *layout]
    weights = arguments["weights"][0] = arguments["weights"][0].detach().requires_grad_()
    return [weights]


def _select_keyed(*args: Any, **kwargs: Any) -> list[Tensor]:
    """Compute FBGEMM's ``keyed_jagged_index_select_dim1``, which exists only for CUDA, on CPU."""
    names = "values", "lengths", "offsets", "indices", "batch_size", "weights"
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    lengths, weights, size = given["lengths"], given.get("weights"), given["batch_size"]
    first = torch.arange(lengths.numel() // size)[:, None] * size
    rows = (first + given["indices"].long()).flatten().int()
    permute = torch.ops.fbgemm.permute_1D_sparse_data
    lengths, values, weights = permute(rows, lengths, given["values"], weights, None)
    return [values, lengths, *([] if weights is None else [weights])]


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, _bias: Any, *rows: Any, scale: float
) -> list[Tensor]:
    """Compute attention like ``torch.ops.aten._efficient_attention_forward``, but on the CPU.

    Supports ``cu_seqlens`` without bias, mask and dropout. Raises ValueError for rows that are
    longer than ``max_seqlen``, which CUDA would cut off, and for heads whose size is no multiple of
    16 bytes.
    """
    if query.shape[3] * query.element_size() % 16:
        raise ValueError("the sizes of attention heads must be multiples of 16 bytes")
    sizes = [borders.diff().tolist() for borders in rows[:2]]
    for of_rows, most in zip(sizes, rows[2:4], strict=True):
        if max(of_rows, default=0) > most:
            raise ValueError(f"a row has more values than max_seqlen={most}")
    output, packed = [], (query[0], key[0], value[0])
    for q, k, v in zip(*map(torch.split, packed, (*sizes, sizes[1])), strict=True):
        weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(2)
        output.append(torch.einsum("hqk,khd->qhd", weights, v))
    return [torch.cat(output).unsqueeze(0)]


#: CPU implementations of functions that exist only for CUDA.
_ON_CPU: dict[str, Callable[..., Any]] = {
    "keyed_jagged_index_select_dim1": _select_keyed,
    "aten::_efficient_attention_forward": efficient_attention,
}


class _Nested(torch.autograd.Function):
    """Autograd node that runs a function and its backward pass on the underlying CPU tensors."""

    @staticmethod
    def forward(ctx: Any, run: Any, name: str, kernels: int, *given: Any) -> Any:
        with _disable_current_modes(), torch.enable_grad():
            stored = [
                _stored(each).detach().requires_grad_(needs) if isinstance(each, Tensor) else each
                for each, needs in zip(given, ctx.needs_input_grad[3:], strict=True)
            ]
            result, trained = run(stored)
            outputs = _tensors(result)
            made = tuple(_OnCuda(each.detach()) for each in outputs)
        ctx.kept, ctx.named = (outputs, trained, stored), (name, kernels)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(m for m in made if not m.is_floating_point()))
        return made[0] if isinstance(result, Tensor) else made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name, kernels = ctx.named
        _count("dispatched", f"{name} backward")
        _count("launch", f"{name} backward", kernels)
        outputs, trained, stored = ctx.kept
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[1] is not None]
        kept, given = [output for output, _ in pairs], [_stored(gradient) for _, gradient in pairs]
        with _disable_current_modes():
            found = map(_put, torch.autograd.grad(kept, trained, given, allow_unused=True))
            by_input = dict(zip(map(id, trained), found, strict=True))
        return (None,) * 3 + tuple(by_input.get(id(each)) for each in stored)


def _tensors(*values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _stored(value: Any) -> Any:
    return value.stored if isinstance(value, _OnCuda) else value


def _put(value: Any, of: Mapping[int, Tensor] = {}) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, _OnCuda):
        return value
    return of[id(value)] if id(value) in of else _OnCuda(value)


def _is_fake(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", _NAME)


@contextmanager
def fake_cuda(rank: int = 0) -> Iterator[torch.device]:
    """Replace CUDA by a fake device. Use as a context, which yields the device ``cuda:<rank>``.

    Within the context, ``torch.cuda`` reports 8 devices with 80 GiB. Operators that mix CPU and
    CUDA tensors raise RuntimeError, as on CUDA. Results equal those of the CPU. Ranks are processes
    that communicate over gloo. Use it in a new process, such as ``launch(check, 1)``, because torch
    does not support autograd on a device that is registered after a backward pass.

    Example::

        with fake_cuda() as device, host_counts() as counts:
            model.to(device)(batch.to(device)).sum().backward()
        print(counts.by_phase("launch"), counts.by_phase("sync"))
    """
    global _device
    _register()
    _device = torch.device("cuda", rank)
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # for torch.tensor(values, device=...)
    with ExitStack() as stack:
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        stack.callback(_pinned.clear)
        for owner, replaced in _replacements():
            for name, value in replaced.items():
                stack.enter_context(patch.object(owner, name, value))
        with _Factories():  # type: ignore[no-untyped-call]
            yield _device


@cache
def _register() -> None:
    """Register the device type. Cached, because torch supports one Python device per process."""
    setup: Callable[..., None] = backend_registration._setup_privateuseone_for_python_backend
    setup(_NAME, backend_module=_Unavailable())


class _Unavailable(backend_registration._DummyBackendModule):
    """Backend module that reports no available device, so that other code does not choose it."""

    def is_available(self) -> bool:
        return False


def _replacements() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield modules and classes with the attributes to replace."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    properties = SimpleNamespace(
        name="fake", total_memory=_MEMORY, major=9, minor=0, multi_processor_count=132
    )
    nothing = "_lazy_init set_device set_stream manual_seed manual_seed_all set_rng_state"
    results: dict[str, Any] = {
        **dict.fromkeys(f"{nothing} empty_cache reset_peak_memory_stats".split()),
        **dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_allocated"), 0),
        "is_initialized": False,
        "is_available": True,
        "device_count": 8,
        "current_device": _device.index,
        "default_stream": _default,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "mem_get_info": (_MEMORY, _MEMORY),
    }
    functions: dict[str, Any] = {
        **{name: _always(value) for name, value in results.items()},
        "Stream": _Stream,
        "Event": _Event,
        "CUDAGraph": _Graph,
        "graph": _Graph.capture,
        "stream": lambda stream: stream or _streams[-1],
        "current_stream": lambda *_, **__: _streams[-1],
        "synchronize": lambda *_, **__: _count("sync", "synchronize"),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    }
    yield torch.cuda, functions
    # Not in the dispatch mode, which other threads do not have.
    yield torch, {"empty": _empty}
    yield torch.cuda.random, {"current_device": _always(_device.index)}
    yield Tensor, {"pin_memory": _pin, "is_pinned": _is_pinned}
    types = [*optimizer._foreach_supported_types, _OnCuda]
    yield _foreach_utils, {"_foreach_supported_types": types}
    yield optimizer, {"_foreach_supported_types": types}


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _pin(tensor: Tensor, *_: Any) -> Tensor:
    if isinstance(tensor, _OnCuda):
        raise RuntimeError("pin_memory needs a tensor on the CPU.")
    return _remember_pinned(tensor.clone())


def _remember_pinned(tensor: Tensor) -> Tensor:
    _pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def _is_pinned(tensor: Tensor, *_: Any) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def _empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    made: Tensor = _torch_empty(*args, **kwargs)
    return _remember_pinned(made) if pin_memory else made
