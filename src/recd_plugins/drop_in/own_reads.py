"""Ids of deduplicated batches that a model reads by itself."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.errors import ExactnessError
from recd_plugins.words import shortened

# Forward passes that are watched: a model may read otherwise in some of them.
_PASSES = 10
_READS = (
    *("values", "lengths", "lengths_or_none", "offsets", "offsets_or_none", "weights"),
    *("weights_or_none", "length_per_key", "offset_per_key", "to_dict", "__getitem__"),
    # What these give has stored rows, too, and no longer says so.
    *("split", "permute", "flatten_lengths"),
)
# Who asks for these knows that rows are stored once.
_KNOWING = ("inverse_indices", "inverse_indices_or_none")
_LIBRARIES = ("torch", "torchrec", "fbgemm_gpu", "recd_plugins")


class OwnReads:
    """A watch over the first forward passes of a model whose batches are deduplicated.

    Embedding modules return all rows. What a model reads of such a KeyedJaggedTensor by itself are
    the stored ones, without a word: it is refused, at the end of the forward pass. Others do so
    outside of the model, as to count ids, and may.

    Args:
        model: whose own code is watched, and not that of torch, TorchRec and recd-plugins, nor of
            what sharded modules call.
        features: that are deduplicated; others may be taken by name.
    """

    def __init__(self, model: nn.Module, features: Collection[str]) -> None:
        self._features = frozenset(features)
        self._passes = 0
        self._thread: int | None = None  # of a forward pass
        self._methods: dict[str, Callable[..., Any]] = {}
        self._reads: list[str] = []
        self._knows = False
        self._handles = (
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        )

    def _begin(self, *_: object) -> None:
        if torch.compiler.is_compiling() or self._thread is not None:
            return
        self._thread = threading.get_ident()
        for name in (*_READS, *_KNOWING):
            self._methods[name] = vars(KeyedJaggedTensor)[name]
            setattr(KeyedJaggedTensor, name, self._watched(name, self._methods[name]))

    def _end(self, *_: object) -> None:
        if torch.compiler.is_compiling() or self._thread != threading.get_ident():
            return
        for name, method in self._methods.items():
            setattr(KeyedJaggedTensor, name, method)
        self._methods, self._thread = {}, None
        self._passes += 1
        refused = bool(self._reads) and not self._knows
        if refused or self._passes == _PASSES:
            for handle in self._handles:
                handle.remove()
        if refused:
            raise ExactnessError(
                f"the model reads a deduplicated KeyedJaggedTensor by itself, at "
                f"{shortened(self._reads)}: it would find the rows that are stored, not all of "
                "them. Give it a KeyedJaggedTensor of its own, whose features no embedding module "
                "looks up, or leave out dedup (docs/trainer.md, What needs a change)"
            )

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def read(kjt: KeyedJaggedTensor, *arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == self._thread and self._is_stored(kjt):
                here = inspect.currentframe()
                frame = here and here.f_back
                if not (frame is None or _package(frame) in _LIBRARIES or _is_sharded(frame)):
                    self._note(name, arguments, frame)
            return method(kjt, *arguments, **options)

        return read

    def _is_stored(self, kjt: KeyedJaggedTensor) -> bool:
        if not kjt.variable_stride_per_key():
            return False
        return self._methods["inverse_indices_or_none"](kjt) is not None

    def _note(self, name: str, arguments: tuple[Any, ...], frame: FrameType) -> None:
        if name in _KNOWING:
            self._knows = True
        elif name != "__getitem__" or arguments[0] in self._features:
            what = f"[{arguments[0]!r}]" if name == "__getitem__" else f".{name}()"
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({what})"
            if place not in self._reads:
                self._reads.append(place)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_sharded(frame: FrameType) -> bool:
    """Whether a sharded module had this done, be it a kernel of its: it gives all rows back."""
    caller: FrameType | None = frame
    while caller is not None:
        if isinstance(caller.f_locals.get("self"), ShardedModule):
            return True
        caller = caller.f_back
    return False
