"""The optimizer that a model with cached tables shows: its state is whole in checkpoints.

Parameters and optimizer state of a cached kernel are the tensors of its backing store, which lacks
what fast memory has learned since. Whoever asks for them gets them whole: TorchRec's state dict
hooks call ``flush`` of the kernels, and the optimizer below does it for optimizer state. After
loading, ``load`` of the kernels has fast memory follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer


class FlushingOptimizer(EmbeddingFusedOptimizer):
    """The fused optimizer of a cached kernel, whose state has what the fast memory learned.

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
        """The state by parameter."""
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
