"""Copies of chosen rows, and how they learn: as the fused kernel of their table does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function
from torchrec.distributed import comm_ops

from recd_plugin_flexshard.runtime.touched import TouchedRows
from recd_plugin_flexshard.runtime.update_rule import Rates, UpdateRule
from recd_plugin_flexshard.runtime.wire import Codec
from recd_plugins.api import ExactnessError

# In a profile: the learning of copies is part of the lookup, as that of a fused kernel is.
LOOKUP_REGION = "[lookup]_[tiers]"
# And the exchange of touched rows is one of embeddings, as far as its time goes.
SYNC_REGION = "[output_dist]_[tiers]"


@dataclass(frozen=True)
class LookedUp:
    """What the backward pass of a lookup has to know of the forward pass.

    Attributes:
        rows: that the positions stood for.
        touched: what each rank looks up; None where they need not know.
        rates: that it learns by, of each rule, as FBGEMM keeps them; None: those of the backward
            pass, as rows were looked up before their step began.
    """

    rows: Mapping[str, Tensor]
    touched: TouchedRows | None
    rates: Sequence[Rates] | None


class Overlay:
    """Copies of rows of several tables in one matrix, trained inside the backward pass.

    A position is a row of the matrix. The positions of a table follow each other, table by table.
    It is no parameter: no optimizer sees it, and the tables' state dict has its rows.

    Args:
        rows: which row of the table each of its positions holds, by table, int64.
        embedding_dim: width of the rows.
        rules: by table, how its rows are updated.
        group: ranks that hold the same rows and sum their gradients.
        device: of the copies.
        sparse: sum gradients of the rows alone that some rank looked up, not of all.
        codec: of such gradients; those of all rows are reduced in 32 bits.

    Attributes:
        weights: ``[num_rows, embedding_dim]`` float32; zeros until they are set.
        state: sums of row-wise Adagrad, ``[num_rows]`` float32; None with SGD.
        rows: as given; another mapping when the rows have moved.
        num_updates: backward passes that trained the rows.
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
        """Say which rows the positions stand for from now on; they are as many as before."""
        self.rows: Mapping[str, Tensor] = rows
        # Tables of one kernel are updated together.
        self._updates: list[tuple[UpdateRule, slice]] = []
        for rule, tables in groupby(self.positions.items(), key=lambda item: self._rules[item[0]]):
            slices = [positions for _, positions in tables]
            self._updates.append((rule, slice(slices[0].start, slices[-1].stop)))

    @property
    def positions(self) -> dict[str, slice]:
        """The positions of each table."""
        slices, start = {}, 0
        for table, rows in self.rows.items():
            slices[table] = slice(start, start + len(rows))
            start += len(rows)
        return slices

    def look_up(self, positions: Tensor, *, ahead: bool) -> Tensor:
        """Embeddings ``[n, embedding_dim]`` of ``positions``; the backward pass trains them.

        It does so without positions, too, as other ranks have some.

        Args:
            positions: ``[n]``, repeated ones too.
            ahead: as ``looked_up`` has it.
        """
        output: Tensor = _TierLookup.apply(  # type: ignore[no-untyped-call]
            self.anchor(), self, positions, self.looked_up(positions, ahead=ahead)
        )
        return output

    def looked_up(self, positions: Tensor, *, ahead: bool) -> LookedUp:
        """What the backward pass of a lookup of ``positions`` has to know.

        Args:
            positions: ``[n]``, repeated ones too.
            ahead: they are looked up before their step begins.
        """
        rates = None if ahead else self._rates()
        return LookedUp(self.rows, self._touched(positions), rates)

    def _rates(self) -> list[Rates]:
        return [rule.rates for rule, _ in self._updates]

    def _touched(self, positions: Tensor) -> TouchedRows | None:
        """Tell the other ranks what this one looks up, where a backward pass may follow."""
        if not self._sparse or not torch.is_grad_enabled():
            return None
        if self._group.size() == 1 or not len(self.weights):
            return None
        with torch.no_grad(), record_function(SYNC_REGION):
            return TouchedRows(positions, len(self.weights), self._group, self._codec)

    def anchor(self) -> Tensor:
        """A scalar that needs a gradient: without an input that does, there is no backward pass.

        On the device of the copies. Autograd runs what is on another one in another thread, which
        would leave the order of collectives to chance.
        """
        return torch.zeros((), device=self.weights.device, requires_grad=True)

    def train(self, looked_up: LookedUp, positions: Tensor, gradients: Tensor) -> None:
        """Update the rows at the end of the backward pass that is running, on all ranks.

        Starts to sum over the ranks at once.

        Args:
            looked_up: of the forward pass.
            positions: of it.
            gradients: ``[n, embedding_dim]``, of the losses of the ranks, not of their mean.

        Raises:
            ExactnessError: rows have moved since the forward pass.
        """
        if looked_up.rows is not self.rows:
            raise ExactnessError(
                "rows moved between the tiers after a batch was looked up and before its backward "
                "pass, which would train other rows: leave retier_every away under a pipeline that "
                "looks the next batch up before the backward pass of this one"
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
            # After those of other overlays have started, too.
            _at_end_of_backward(finish)

        def finish() -> None:
            with record_function(SYNC_REGION):
                gradient = total.result()
            self._update(gradient, total.rows, divisor, rates)

        _at_end_of_backward(pass_on)

    @torch.no_grad()
    def _update(
        self, gradient: Tensor, touched: Tensor | None, divisor: int, rates: Sequence[Rates]
    ) -> None:
        """``gradient`` of all positions, or of ``touched`` ones, ascending."""
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

    def _touched_parts(self, touched: Tensor) -> list[tuple[UpdateRule, slice | Tensor, slice]]:
        """``touched`` by rule, and where they are in it."""
        if len(self._updates) == 1:
            return [(self._updates[0][0], touched, slice(None))]
        starts = torch.tensor([part.stop for _, part in self._updates], device=touched.device)
        ends = torch.searchsorted(touched, starts).tolist()
        slices = [slice(*ends_) for ends_ in zip([0, *ends], ends, strict=False)]
        return [(rule, touched[s], s) for (rule, _), s in zip(self._updates, slices, strict=True)]


def _at_end_of_backward(call: Callable[[], None]) -> None:
    # torch has no public way to run something when a backward pass is over; DDP does it so.
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
        # Sorts the positions: sums are the same every time, and the most read row is no bottleneck.
        total: Tensor = torch.ops.aten.embedding_dense_backward(
            gradients, positions, num_rows, -1, False
        )
        return total
    return gradients.new_zeros(num_rows, gradients.shape[1]).index_add_(0, positions, gradients)
