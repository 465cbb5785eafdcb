"""``recd.sum``, ``recd.mean`` and ``recd.max``: element-wise poolings, without parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from recd_plugins.api import Pooling

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchrec.sparse.jagged_tensor import JaggedTensor


class _Reduction(Pooling):
    always_trained = True
    mode: ClassVar[str]

    def build(self, embedding_dim: int) -> nn.Module:  # noqa: ARG002
        from recd_plugin_recd.pooling.reduction_modules import Reduction

        return Reduction(self.mode)

    def pool(
        self,
        modules: Sequence[nn.Module],  # noqa: ARG002
        sequences: Sequence[JaggedTensor],
    ) -> Tensor:
        from recd_plugin_recd.pooling.reduction_modules import reduce_rows

        return reduce_rows(sequences, self.mode)


class SumPooling(_Reduction):
    """Sum of a sequence's embeddings."""

    name = "recd.sum"
    mode = "sum"
    equal_gradients = True


class MeanPooling(_Reduction):
    """Mean of a sequence's embeddings."""

    name = "recd.mean"
    mode = "mean"
    equal_gradients = True


class MaxPooling(_Reduction):
    """Element-wise maximum of a sequence's embeddings."""

    name = "recd.max"
    mode = "max"
