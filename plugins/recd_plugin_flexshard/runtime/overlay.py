"""Copies of table rows, trained with the same updates as the tables' fused FBGEMM kernels."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function
from torchrec.distributed import comm_ops
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding

from recd_plugin_flexshard.runtime.touched import Codec, Routes, TouchedRows
from recd_plugins.api import ExactnessError

# Names of regions of a profile: copies learn in the lookup, as in a fused kernel.
LOOKUP_REGION = "[lookup]_[tiers]"
SYNC_REGION = "[output_dist]_[tiers]"
_REFUSED_OPTIONS = (
    "weight_decay",
    "gradient_clipping",
    "max_norm",
    "weight_decay_mode",
    "regularization_mode",
)


class Rates(NamedTuple):
    """Optimizer hyperparameters at the time of a lookup."""

    learning_rate: float
    eps: float


class UpdateRule:
    """Applies the optimizer update of one fused FBGEMM kernel to copies of its rows.

    Raises:
        ExactnessError: row copies do not support the kernel's optimizer or optimizer options.
    """

    def __init__(self, kernel: Any, tables: Iterable[str]) -> None:
        self._kernel = kernel
        self._tables = ", ".join(map(repr, tables))
        if kernel.optimizer not in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
            self._refuse(f"the optimizer {kernel.optimizer.value}")
        output = SparseType.from_int(kernel.output_dtype)
        if output != SparseType.FP32:
            self._refuse(f"the output_dtype {output.value}")
        self._check_options()

    def _refuse(self, what: str) -> None:
        raise ExactnessError(
            f"tables {self._tables}: flexshard does not support {what}. Use EXACT_SGD or "
            "EXACT_ROWWISE_ADAGRAD in float32 without further options, or do not use flexshard."
        )

    def _check_options(self) -> None:
        for option in _REFUSED_OPTIONS:
            if value := getattr(self._kernel.optimizer_args, option):
                self._refuse(f"the optimizer option '{option}={value}'")

    @property
    def has_state(self) -> bool:
        """Return whether the optimizer stores a sum of squared gradients for each row."""
        return bool(self._kernel.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD)

    @property
    def rates(self) -> Rates:
        """Return the kernel's current optimizer hyperparameters."""
        return Rates(self._kernel.get_learning_rate(), self._kernel.optimizer_args.eps)

    def update(self, weights: Tensor, state: Tensor | None, gradient: Tensor, rates: Rates) -> None:
        """Update rows in place with one optimizer step.

        SGD computes ``w -= lr * g``. Row-wise Adagrad computes ``s += mean(g * g)`` over the row,
        then ``w -= lr * g / (sqrt(s) + eps)``. Rows with zero gradients do not change.

        Args:
            weights: rows to update, float32 ``[n, embedding_dim]``.
            state: row-wise Adagrad's sums of squares, float32 ``[n]``; None with SGD.
            gradient: gradients of the rows, float32 ``[n, embedding_dim]``.
            rates: learning rate and epsilon.
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
        # With eps 0, a row without gradients would become 0 * infinity.
        scale.masked_fill_(state == 0, 0)
        weights.addcmul_(gradient, scale.unsqueeze(1), value=-1)


def update_rules(lookups: Iterable[nn.Module], tiered: Container[str]) -> dict[str, UpdateRule]:
    """Return a dict from name of a table with row copies to its update rule.

    Tables that share a kernel share a rule.
    """
    rules: dict[str, UpdateRule] = {}
    for module in (module for lookup in lookups for module in lookup.modules()):
        if isinstance(module, BatchedFusedEmbedding):
            names = [table.name for table in module.config.embedding_tables]
            if tables := [name for name in names if name in tiered]:
                rules.update(dict.fromkeys(tables, UpdateRule(module.emb_module, tables)))
    return rules


@dataclass(frozen=True)
class LookedUp:
    """State that a lookup of row copies saves for its backward pass.

    Attributes:
        rows: row numbers of the copied rows at the time of the lookup, keyed by table.
        touched: indices that each rank looked up; None if gradients are all-reduced.
        rates: hyperparameters of each update rule. None if the lookup ran before its step began;
            the backward pass then uses the current hyperparameters.
    """

    rows: Mapping[str, Tensor]
    touched: TouchedRows | None
    rates: Sequence[Rates] | None


class Overlay:
    """A matrix of copied table rows on this rank, trained inside the backward pass.

    A position is a row index of the matrix. Copies of one table have adjacent positions. The matrix
    is not a parameter, so optimizers and state dicts do not contain it.

    Attributes:
        weights: the copies, float32 ``[num_rows, embedding_dim]``.
        state: row-wise Adagrad's sums of squares, float32 ``[num_rows]``; None with SGD.
        rows: row numbers of the copied rows in their table, int64 ``[n]``, keyed by table.
        num_updates: number of backward passes that trained the copies.
    """

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        embedding_dim: int,
        rules: Mapping[str, UpdateRule],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        sparse: bool = False,
        codec: Codec | None = None,
    ) -> None:
        num_rows = sum(map(len, rows.values()))
        self.weights = torch.zeros(num_rows, embedding_dim, device=device)
        has_state = any(rules[table].has_state for table in rows)
        self.state = torch.zeros(num_rows, device=device) if has_state else None
        self.num_updates = 0
        self._rules = rules
        self._group = group
        self._sparse = sparse
        self._codec = codec or Codec(None, embedding_dim)
        self.hold(rows)

    def hold(self, rows: Mapping[str, Tensor]) -> None:
        """Set the copied row numbers (int64), keyed by table; as many in total as before."""
        self.rows: Mapping[str, Tensor] = rows
        self._updates = self._parts({table: len(of_table) for table, of_table in rows.items()})

    def _parts(self, sizes: Mapping[str, int]) -> list[tuple[UpdateRule, slice]]:
        """Return each update rule with its slice of the matrix, given the rows of each table."""
        # Tables of one kernel are updated together.
        parts, start = [], 0
        for rule, tables in groupby(sizes, key=self._rules.__getitem__):
            stop = start + sum(sizes[table] for table in tables)
            parts.append((rule, slice(start, stop)))
            start = stop
        return parts

    def touched(self, positions: Tensor, sizes: Mapping[str, int]) -> TouchedRows | None:
        """Start to tell the other ranks which copies this rank looks up.

        All ranks must call this before a lookup that a backward pass may follow.

        Args:
            positions: row indices of the matrix, int64 ``[n]``.
            sizes: number of rows of each table in the matrix at the time of the lookup.

        Returns:
            The exchange; None if gradients are all-reduced, or if no other rank has copies.
        """
        if not self._sparse or self._group.size() == 1 or not len(self.weights):
            return None
        with torch.no_grad(), record_function(SYNC_REGION):
            ends = [part.stop for _, part in self._parts(sizes)]
            return TouchedRows(positions, ends, self._group, self._codec)

    def look_up(self, positions: Tensor, touched: TouchedRows | None, *, ahead: bool) -> Tensor:
        """Return the copies at ``positions``, float32 ``[n, embedding_dim]``.

        The backward pass updates the copies. ``look_up`` may be a collective call, so all ranks
        must call it, even with empty ``positions``.

        Args:
            positions: row indices of the matrix, int64 ``[n]``.
            touched: result of ``touched``; None if it was not called.
            ahead: whether the lookup runs before its training step begins.
        """
        looked_up = self.looked_up(positions, touched, ahead=ahead)
        output: Tensor = _TierLookup.apply(  # type: ignore[no-untyped-call]
            self.anchor(), self, positions, looked_up
        )
        return output

    def looked_up(self, positions: Tensor, touched: TouchedRows | None, *, ahead: bool) -> LookedUp:
        if touched is None and torch.is_grad_enabled():  # the batch was sent without gradients
            touched = self.touched(positions, {name: len(rows) for name, rows in self.rows.items()})
        return LookedUp(self.rows, touched, None if ahead else self._rates())

    def _rates(self) -> list[Rates]:
        return [rule.rates for rule, _ in self._updates]

    def anchor(self) -> Tensor:
        """Return a zero that requires a gradient, so that autograd always runs the backward pass.

        The zero is on the device of the copies: autograd has one thread per device, and collectives
        need the same order on all ranks.
        """
        return torch.zeros((), device=self.weights.device, requires_grad=True)

    def train(self, looked_up: LookedUp, positions: Tensor, gradients: Tensor) -> None:
        """Start to sum ``gradients`` over ranks, and update the copies at the end of backward.

        Args:
            looked_up: state of the lookup.
            positions: looked-up row indices of the matrix, int64 ``[n]``.
            gradients: gradients of this rank's loss, float32 ``[n, embedding_dim]``.
        """
        if looked_up.rows is not self.rows:
            raise ExactnessError(
                "flexshard: retier_every changed the copied rows between the forward and the "
                "backward pass of a batch. Remove retier_every, or use a train pipeline that "
                "looks up each batch after the backward pass of the previous batch."
            )
        divisor = dist.get_world_size() if comm_ops.get_gradient_division() else 1
        rates = self._rates() if looked_up.rates is None else looked_up.rates
        if looked_up.touched is None:
            self._train_all(positions, gradients, divisor, rates)
        else:
            self._train_touched(looked_up.touched, positions, gradients, divisor, rates)

    def _train_all(
        self, positions: Tensor, gradients: Tensor, divisor: int, rates: Sequence[Rates]
    ) -> None:
        with record_function(LOOKUP_REGION):
            total = _sum_by_position(gradients, positions, len(self.weights))
        work = None
        if self._group.size() > 1 and len(total):
            work = dist.all_reduce(total, group=self._group, async_op=True)

        def finish() -> None:
            if work is not None:
                work.wait()
            self._update(total, None, divisor, rates)

        _at_end_of_backward(finish)

    def _train_touched(
        self,
        touched: TouchedRows,
        positions: Tensor,
        gradients: Tensor,
        divisor: int,
        rates: Sequence[Rates],
    ) -> None:
        with record_function(SYNC_REGION):
            total = touched.start(gradients, positions, _sum_by_position)

        def pass_on() -> None:
            with record_function(SYNC_REGION):
                total.pass_on()
            # Runs after the sums of other overlays have started.
            _at_end_of_backward(finish)

        def finish() -> None:
            with record_function(SYNC_REGION):
                gradient = total.result()
            self._update(gradient, touched.routes, divisor, rates)

        _at_end_of_backward(pass_on)

    @torch.no_grad()
    def _update(
        self, gradient: Tensor, touched: Routes | None, divisor: int, rates: Sequence[Rates]
    ) -> None:
        with record_function(LOOKUP_REGION):
            if divisor > 1:
                gradient.div_(divisor)
            parts: list[tuple[UpdateRule, slice | Tensor, slice]]
            parts = [(rule, each, each) for rule, each in self._updates]
            if touched is not None:
                parts = self._touched_parts(touched)
            for (rule, positions, part), of_lookup in zip(parts, rates, strict=True):
                weights = self.weights[positions]
                state = None if self.state is None else self.state[positions]
                rule.update(weights, state, gradient[part], of_lookup)
                if touched is not None:
                    self.weights[positions] = weights
                    if self.state is not None and state is not None:
                        self.state[positions] = state
        self.num_updates += 1

    def _touched_parts(self, touched: Routes) -> list[tuple[UpdateRule, slice | Tensor, slice]]:
        """Return each update rule with its rows of ``touched.rows`` and their slice in it."""
        slices = [slice(*pair) for pair in pairwise([0, *touched.ends])]
        rules = [rule for rule, _ in self._updates]
        return [(rule, touched.rows[s], s) for rule, s in zip(rules, slices, strict=True)]


def _at_end_of_backward(call: Callable[[], None]) -> None:
    # torch has no public hook for the end of a backward pass; DDP uses the same private one.
    engine: Any = Variable._execution_engine
    engine.queue_callback(call)


class _TierLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _: Tensor, overlay: Overlay, positions: Tensor, looked_up: LookedUp
    ) -> Tensor:
        ctx.overlay, ctx.looked_up = overlay, looked_up
        ctx.save_for_backward(positions)
        with record_function(LOOKUP_REGION):
            return overlay.weights.index_select(0, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.overlay.train(ctx.looked_up, *ctx.saved_tensors, gradients)
        return None, None, None, None


def _sum_by_position(gradients: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    if gradients.is_cuda:
        # Sorting the positions makes sums deterministic and avoids contention on the most read row.
        total: Tensor = torch.ops.aten.embedding_dense_backward(
            gradients, positions, num_rows, -1, False
        )
        return total
    return gradients.new_zeros(num_rows, gradients.shape[1]).index_add_(0, positions, gradients)
