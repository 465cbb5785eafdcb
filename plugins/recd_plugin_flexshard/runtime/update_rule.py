"""How FBGEMM's fused kernels update a row, for copies of rows that are not in a kernel."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding

from recd_plugins.api import ExactnessError
from recd_plugins.api.distributed import require_attributes

_REFUSED_OPTIONS = (
    "weight_decay",
    "gradient_clipping",
    "max_norm",
    "weight_decay_mode",
    "regularization_mode",
)


class Rates(NamedTuple):
    """What a kernel learns by."""

    learning_rate: float
    eps: float


class UpdateRule:
    """The update of one fused kernel, with the learning rate and eps that it had in a lookup.

    Args:
        kernel: FBGEMM's.
        tables: names of its tables, for errors.

    Raises:
        ExactnessError: its optimizer is neither SGD nor row-wise Adagrad, or has options that
            change the update, or its embeddings are no 32-bit floats.
    """

    def __init__(self, kernel: Any, tables: Iterable[str]) -> None:
        require_attributes(
            kernel, "optimizer", "optimizer_args", "get_learning_rate", "output_dtype"
        )
        require_attributes(kernel.optimizer_args, "eps", *_REFUSED_OPTIONS)
        self._kernel = kernel
        self._tables = ", ".join(tables)
        if kernel.optimizer not in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
            raise ExactnessError(
                f"tiered tables {self._tables} have the optimizer {kernel.optimizer.value}; copies "
                "of rows learn by exact_sgd or exact_row_wise_adagrad only"
            )
        output = SparseType.from_int(kernel.output_dtype)
        if output != SparseType.FP32:
            raise ExactnessError(
                f"tiered tables {self._tables} have output_dtype {output.value}; embeddings of "
                "copies are 32-bit floats: leave it away"
            )
        self._check_options()

    def _check_options(self) -> None:
        arguments = self._kernel.optimizer_args
        for option in _REFUSED_OPTIONS:
            if getattr(arguments, option):
                raise ExactnessError(
                    f"tiered tables {self._tables} have {option}={getattr(arguments, option)} in "
                    "their optimizer, which copies of rows do not follow: leave it away"
                )

    @property
    def has_state(self) -> bool:
        """Whether a row has a sum of squared gradients."""
        return bool(self._kernel.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD)

    @property
    def rates(self) -> Rates:
        """Those of the kernel now; it learns by those that it has when rows are looked up."""
        return Rates(self._kernel.get_learning_rate(), self._kernel.optimizer_args.eps)

    def update(self, weights: Tensor, state: Tensor | None, gradient: Tensor, rates: Rates) -> None:
        """Update rows in place.

        SGD: ``w -= lr * g``. Row-wise Adagrad: ``s += mean(g * g)`` over the row's scalars, then
        ``w -= lr * g / (sqrt(s) + eps)``. Rows without a gradient stay as they are.

        Args:
            weights: ``[n, embedding_dim]``.
            state: sums of squares, ``[n]``; None where there are none.
            gradient: ``[n, embedding_dim]``.
            rates: of the lookup.

        Raises:
            ExactnessError: the kernel got an option since that changes the update.
        """
        self._check_options()
        rate, eps = rates
        if not self.has_state:
            weights.add_(gradient, alpha=-rate)
            return
        assert state is not None
        norms = torch.linalg.vector_norm(gradient, dim=1)
        state.addcmul_(norms, norms, value=1 / gradient.shape[1])
        scale = rate / (state.sqrt() + eps)
        # With eps 0 a row that never had a gradient would become 0 * infinity.
        scale.masked_fill_(state == 0, 0)
        weights.addcmul_(gradient, scale.unsqueeze(1), value=-1)


def update_rules(lookups: Iterable[nn.Module], tiered: Container[str]) -> dict[str, UpdateRule]:
    """The rule of each tiered table that this rank has; tables of one kernel share one.

    Args:
        lookups: of the sharded collection, whose other tables learn as they like.
        tiered: names of tables.

    Raises:
        ExactnessError: see ``UpdateRule``.
    """
    rules: dict[str, UpdateRule] = {}
    for module in (module for lookup in lookups for module in lookup.modules()):
        if isinstance(module, BatchedFusedEmbedding):
            names = [table.name for table in module.config.embedding_tables]
            if tables := [name for name in names if name in tiered]:
                rules.update(dict.fromkeys(tables, UpdateRule(module.emb_module, tables)))
    return rules
