"""What a model with cached tables shows of them: whether they look ahead, and their checkpoints.

Parameters and optimizer state of a cached kernel are the tensors of its slow tier, which lacks what
the fast tier has learned since. Whoever asks for them gets them whole: TorchRec's state dict hooks
call ``flush`` of the kernels, and the optimizer below does it for optimizer state. After loading,
``load`` of the kernels has the fast tier follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding

from recd_plugins.distributed.cached.spec import TableCache

if TYPE_CHECKING:
    from recd_plugins.distributed.cached.kernel import CachedEmbedding, CachedEmbeddingBag


class FlushingOptimizer(EmbeddingFusedOptimizer):
    """The fused optimizer of a cached kernel, whose state has what the fast tier learned.

    Names, shapes and types are TorchRec's. An optimizer around this one asks for ``state`` in its
    ``state_dict`` and ``load_state_dict``, and for nothing else, and tells when it has loaded.

    Args:
        flush: of the kernel; called before the state is read.
        load: of the kernel; called after a state was loaded.
        arguments: TorchRec's.
    """

    def __init__(
        self, *, flush: Callable[[], None], load: Callable[[], None], **arguments: Any
    ) -> None:
        self._flush: Callable[[], None] | None = None
        super().__init__(**arguments)
        self._flush = flush
        self._load = load

    @property
    def state(self) -> Any:
        """By parameter."""
        if self._flush is not None:
            self._flush()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    def post_load_state_dict(self) -> None:
        """Called after loading, by an optimizer around this one too."""
        super().post_load_state_dict()
        self._load()


def follow_loading(
    module: nn.Module, kernels: Iterable[CachedEmbedding | CachedEmbeddingBag]
) -> None:
    """Have the fast tiers of a sharded module's kernels follow whenever it loads a state dict."""
    following = tuple(kernels)

    def load(*_: Any) -> None:
        for kernel in following:
            kernel.load()

    if following:
        module.register_load_state_dict_post_hook(load)  # type: ignore[no-untyped-call]


def looks_ahead(model: nn.Module) -> bool:
    """Whether a table wants its rows fetched before the batch that needs them is computed.

    Those are tables with a cache whose ``lookahead`` is set, and those that FBGEMM caches
    (``fused_uvm_caching`` planned with ``CacheParams(prefetch_pipeline=True)``). All ranks say the
    same, those without a row of such a table too: their pipelines have to send in one order.

    Args:
        model: sharded.
    """
    return any(
        _looks_ahead(sharding, getattr(module, "_caches", {}).get(table))
        for module in model.modules()
        for table, sharding in getattr(module, "module_sharding_plan", {}).items()
    )


def _looks_ahead(sharding: ParameterSharding, cache: TableCache | None) -> bool:
    if sharding.compute_kernel != EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
        return False
    if cache is not None:
        return cache.lookahead
    return sharding.cache_params is not None and bool(sharding.cache_params.prefetch_pipeline)
