"""Lookup of flex rows (copied to every node), and merging of hot, flex and cold embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugin_flexshard.runtime.overlay import LOOKUP_REGION, LookedUp, Overlay
from recd_plugin_flexshard.runtime.split import TierSplit
from recd_plugin_flexshard.runtime.touched import Codec, TouchedRows, Wire


@dataclass
class FlexSizes:
    """Number of ids to send to and receive from each rank of the node, for rows copied to nodes.

    Both are nested lists ``[ranks_per_node][F]``, with one count per feature.
    """

    sent: list[list[int]]
    received: list[list[int]]


class TierInputs(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """Input dist of row copies. Returns an awaitable of the requested flex rows.

    Exchanges ids of flex rows within the node, and which copies each rank looked up. The backward
    pass needs no further sizes, and does not wait for the device.

    Args:
        split: the ids of the batch.
        hot, flex: the copies.
        group: process group of the ranks of the node.
        trains: whether a backward pass may follow.

    Attributes:
        sizes: numbers of flex ids after the first wait; None without flex rows.
        hot_touched, flex_touched: result of ``Overlay.touched`` after the second wait.
    """

    def __init__(
        self,
        split: TierSplit,
        hot: Overlay,
        flex: Overlay,
        group: dist.ProcessGroup,
        *,
        trains: bool,
    ) -> None:
        super().__init__()
        self.sizes: FlexSizes | None = None
        self.hot_touched: TouchedRows | None = None
        self.flex_touched: TouchedRows | None = None
        self.split, self.flex, self.group, self.trains = split, flex, group, trains
        if trains:
            self.hot_touched = hot.touched(split.hot, split.index.hot_sizes())
        if split.index.num_flex:
            # Sent and received sizes share one tensor, so that one copy to the host is enough.
            self._both = torch.stack([split.flex_sizes, split.flex_sizes])
            self._work = _start(self._both[1], split.flex_sizes, group)

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        if self.split.index.num_flex:
            self._work.wait()
            self.sizes = FlexSizes(*self._both.tolist())
        return _TierInputsAwaitable(self)

    def record_stream(self, stream: torch.Stream) -> None:
        """Call ``Tensor.record_stream`` for all tensors that the backward pass uses."""
        for touched in (self.hot_touched, self.flex_touched):
            if touched is not None:
                touched.record_stream(stream)


class _TierInputsAwaitable(Awaitable[KeyedJaggedTensor]):
    """Awaitable of the row copies that the ranks of the node request from this rank.

    Returns a KeyedJaggedTensor with one key. Its values are indices of this rank's row copies.
    """

    def __init__(self, inputs: TierInputs) -> None:
        super().__init__()
        self._inputs = inputs
        self._received = ids = inputs.split.flex
        if (sizes := inputs.sizes) is not None:
            sent, received = _totals(sizes.sent), _totals(sizes.received)
            self._received = ids.new_empty(sum(received))
            self._work = _start(self._received, ids, inputs.group, received, sent)

    def _wait_impl(self) -> KeyedJaggedTensor:
        inputs, num_ids = self._inputs, len(self._received)
        if inputs.sizes is not None:
            self._work.wait()
            if inputs.trains:
                sizes = inputs.split.index.flex_sizes(inputs.group.rank())
                inputs.flex_touched = inputs.flex.touched(self._received, sizes)
        for touched in (inputs.hot_touched, inputs.flex_touched):
            if touched is not None:
                _ = touched.routes  # waits for the device here, not in the backward pass
        return KeyedJaggedTensor(
            keys=["flex"],
            values=self._received,
            lengths=torch.full((1,), num_ids, device=self._received.device),
            length_per_key=[num_ids],
        )


class FlexLookup:
    """Looks up row copies requested by the ranks of the node, and sends the embeddings."""

    def __init__(
        self,
        overlay: Overlay,
        positions: Tensor,
        sizes: FlexSizes,
        group: dist.ProcessGroup,
        wire: Wire,
        touched: TouchedRows | None,
        *,
        ahead: bool,
    ) -> None:
        self._exchange = _Exchange(group, _totals(sizes.received), _totals(sizes.sent), wire)
        looked_up = overlay.looked_up(positions, touched, ahead=ahead)
        self._token: Tensor = _TierSend.apply(  # type: ignore[no-untyped-call]
            overlay.anchor(), overlay, positions, looked_up, self._exchange
        )

    def wait(self) -> Tensor:
        """Return the embeddings of ids of rows copied to nodes, ``[num_flex, embedding_dim]``."""
        output: Tensor = _TierReceive.apply(  # type: ignore[no-untyped-call]
            self._token, self._exchange
        )
        return output


class _Exchange:
    """All-to-all of embeddings (forward) and gradients (backward) within a node."""

    def __init__(
        self, group: dist.ProcessGroup, held: Sequence[int], wanted: Sequence[int], wire: Wire
    ) -> None:
        self._group, self._held, self._wanted = group, list(held), list(wanted)
        self._wire = wire
        self._under_way: tuple[Tensor, Tensor, dist.Work, Codec] | None = None

    def start(self, rows: Tensor, *, back: bool = False) -> None:
        send, receive = (self._wanted, self._held) if back else (self._held, self._wanted)
        codec = self._wire.gradients if back else self._wire.rows
        rows = codec.encode(rows.contiguous())
        output = rows.new_empty(sum(receive), rows.shape[1])
        work = _start(output, rows, self._group, receive, send)
        self._under_way = (rows, output, work, codec)

    def finish(self) -> Tensor:
        assert self._under_way is not None
        _, output, work, codec = self._under_way
        self._under_way = None
        work.wait()
        return codec.decode(output)


class _TierSend(torch.autograd.Function):
    """Starts to send embeddings. The backward pass waits for gradients and trains the copies."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        overlay: Overlay,
        positions: Tensor,
        looked_up: LookedUp,
        exchange: _Exchange,
    ) -> Tensor:
        ctx.overlay, ctx.looked_up, ctx.exchange = overlay, looked_up, exchange
        ctx.save_for_backward(positions)
        with record_function(LOOKUP_REGION):
            rows = overlay.weights.index_select(0, positions)
        exchange.start(rows)
        return anchor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, None, None, None, None]:
        ctx.overlay.train(ctx.looked_up, *ctx.saved_tensors, ctx.exchange.finish())
        return None, None, None, None, None


class _TierReceive(torch.autograd.Function):
    """Waits for the embeddings. The backward pass starts to send their gradients."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        ctx.save_for_backward(token)
        return exchange.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(gradients, back=True)
        (token,) = ctx.saved_tensors
        return torch.zeros_like(token), None


def _totals(sizes: list[list[int]]) -> list[int]:
    return [sum(of_features) for of_features in sizes]


def _start(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
) -> dist.Work:
    work: dist.Work = dist.all_to_all_single(
        output, input, output_splits, input_splits, group=group, async_op=True
    )
    return work


class TieredAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """Awaitable output of the sharded collection. Merges embeddings of rows with and without copy.

    Args:
        split: the ids of the batch, split by copies of their rows.
        cold: embeddings of rows without copies.
        hot: embeddings of rows copied to every rank, ``[num_hot, embedding_dim]``, or None.
        flex: lookup of rows copied to every node, or None.
        need_indices: whether to return the ids as weights of the JaggedTensors.
    """

    def __init__(
        self,
        split: TierSplit,
        cold: LazyAwaitable[dict[str, JaggedTensor]],
        hot: Tensor | None,
        flex: FlexLookup | None,
        need_indices: bool,
    ) -> None:
        super().__init__()
        self._split = split
        self._cold = cold
        self._hot = hot
        self._flex = flex
        self._need_indices = need_indices

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        split = self._split
        output = dict(self._cold.wait())
        features = split.index.features
        tiers = [output[name].values() for name in features]
        if split.ids.is_cuda:  # fewer launches
            tiers = [torch.cat(tiers)]
        sources = list(torch.split(split.cold_source, [len(tier) for tier in tiers]))
        if self._hot is not None:
            tiers.append(self._hot)
            sources.append(split.hot_source)
            self._hot = None  # the caller may keep this object
        if self._flex is not None:
            tiers.append(self._flex.wait())
            sources.append(split.flex_source)
        merged = _TierMerge.apply(sources, *tiers)  # type: ignore[no-untyped-call]
        values = torch.split(merged, split.ids_per_feature)
        ids = torch.split(split.ids, split.ids_per_feature)
        for number, name in enumerate(features):
            output[name] = JaggedTensor(
                values=values[number],
                lengths=split.lengths[number],
                weights=ids[number] if self._need_indices else None,
            )
        return output


class _TierMerge(torch.autograd.Function):
    """Copies the rows of several matrices into one matrix, at the row indices in ``sources``."""

    @staticmethod
    def forward(ctx: Any, sources: list[Tensor], *tiers: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        merged = tiers[0].new_empty(sum(map(len, tiers)), tiers[0].shape[1])
        # Concatenating first would hold all embeddings twice.
        for source, tier in zip(sources, tiers, strict=True):
            merged.index_copy_(0, source, tier)
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient.index_select(0, source) for source in ctx.saved_tensors)
