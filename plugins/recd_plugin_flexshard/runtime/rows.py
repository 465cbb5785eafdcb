"""Copies and tables in step: rows move between row-wise shards and the copies of the tiers.

Rows are copied bit for bit, in pieces of ``PIECE_BYTES`` at most. Checkpoints are those of the
tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torchrec.optim.keyed import CombinedOptimizer

from recd_plugin_flexshard.runtime.groups import TierGroups
from recd_plugin_flexshard.runtime.overlay import Overlay
from recd_plugin_flexshard.runtime.split import TierIndex
from recd_plugins.api import ExactnessError, SetupError

PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class RowBlocks:
    """The ranks that hold the rows of a table.

    Attributes:
        starts: first row of each block, ascending, int64 on the CPU; empty blocks are left out.
        ranks: the rank of each block, int64 on the CPU.
    """

    starts: Tensor
    ranks: Tensor

    @classmethod
    def of(cls, table: str, metadata: ShardedTensorMetadata) -> RowBlocks:
        """Read the blocks from the metadata of a ShardedTensor."""
        blocks = sorted(
            (shard.shard_offsets[0], _rank(shard.placement), tuple(shard.shard_sizes[1:]))
            for shard in metadata.shards_metadata
            if shard.shard_sizes[0]
        )
        ranks = [rank for _, rank, _ in blocks]
        if len(set(ranks)) < len(ranks) or any(
            columns != tuple(metadata.size[1:]) for _, _, columns in blocks
        ):
            raise SetupError(
                f"table {table}: tiers need a row-wise table with one block of rows a rank; plan "
                "it row_wise"
            )
        return cls(torch.tensor([start for start, _, _ in blocks]), torch.tensor(ranks))

    def locate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rank that holds each of ``rows``, and the row's place in its shard."""
        block = torch.searchsorted(self.starts, rows, right=True) - 1
        return self.ranks[block], rows - self.starts[block]


@dataclass(frozen=True)
class Slots:
    """The rows of an overlay. Tensors are int64 on the CPU, one entry a row.

    Attributes:
        tables: index of the table.
        rows: of the table.
        holders: the rank within its node that holds the copy.
        slots: the copy's row in the overlay's matrix on the ranks that hold it.
        ranks_per_node: that hold each copy once; 1 for hot rows, which every rank holds.
    """

    tables: Tensor
    rows: Tensor
    holders: Tensor
    slots: Tensor
    ranks_per_node: int

    def __len__(self) -> int:
        return self.rows.numel()

    def pieces(self, row_bytes: int) -> Iterator[slice]:
        """Return slices of bounded size; all ranks make the same ones."""
        step = max(1, PIECE_BYTES // row_bytes)
        return (slice(start, start + step) for start in range(0, len(self), step))


@dataclass(frozen=True)
class ColdRows:
    """One quantity of the cold rows of several tables on this rank: weights, or optimizer state.

    Attributes:
        blocks: by table.
        shards: by table, this rank's rows, ``[rows, ...]`` with the same trailing shape, type and
            device in all tables; no rows where the rank holds none.
    """

    blocks: Sequence[RowBlocks]
    shards: Sequence[Tensor]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        shard = self.shards[0]
        return shard[:0].element_size() * max(1, shard.shape[1:].numel())

    def locate(self, slots: Slots, piece: slice) -> tuple[Tensor, Tensor]:
        """Return the owner of each of these slots' cold rows, and the row's place in its shard."""
        tables, rows = slots.tables[piece], slots.rows[piece]
        owners, local = torch.empty_like(rows), torch.empty_like(rows)
        for table, blocks in enumerate(self.blocks):
            here = tables == table
            owners[here], local[here] = blocks.locate(rows[here])
        return owners, local

    def read(self, tables: Tensor, local: Tensor) -> Tensor:
        """Return copies of this rank's rows ``local`` of ``tables``, in that order."""
        shard = self.shards[0]
        values = shard.new_empty((local.numel(), *shard.shape[1:]))
        for table, shard in enumerate(self.shards):
            here = (tables == table).nonzero().squeeze(1)
            if here.numel():
                source = shard.detach().index_select(0, local[here].to(shard.device))
                values.index_copy_(0, here.to(shard.device), source)
        return values

    def write(self, tables: Tensor, local: Tensor, values: Tensor) -> None:
        """Overwrite this rank's rows ``local`` of ``tables``.

        They are looked up as copies only, so a batch under way did not read them, and its backward
        pass may not take the table for a changed one.
        """
        for table, shard in enumerate(self.shards):
            here = (tables == table).nonzero().squeeze(1)
            if here.numel():
                source = values.index_select(0, here.to(values.device))
                # Not detach(), which shares the count of changes that autograd compares.
                shard.data.index_copy_(0, local[here].to(shard.device), source)


def refresh(copies: Tensor, slots: Slots, cold: ColdRows, world: dist.ProcessGroup) -> None:
    """Overwrite the copies ``[rows of this rank, ...]`` with the rows of their owners."""
    ranks_per_node = slots.ranks_per_node
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_nodes = world_size // ranks_per_node
    for piece in slots.pieces(cold.row_bytes * num_nodes):
        owners, local = cold.locate(slots, piece)
        holders = slots.holders[piece]
        to_node, num_sent = _grouped(holders, owners == rank, ranks_per_node)
        from_owner, num_received = _grouped(owners, holders == rank % ranks_per_node, world_size)
        to_all = to_node.repeat(num_nodes)
        rows = cold.read(slots.tables[piece][to_all], local[to_all])
        received = _exchange(rows, num_sent * num_nodes, num_received, world)
        copies.index_copy_(0, slots.slots[piece][from_owner].to(copies.device), received)


def fold(copies: Tensor, slots: Slots, cold: ColdRows, node: dist.ProcessGroup) -> None:
    """Overwrite the rows that this rank owns with their copies in ``slots.ranks_per_node`` ranks.

    Where all ranks hold all copies, nothing is sent.
    """
    rank, ranks_per_node = dist.get_rank(), slots.ranks_per_node
    for piece in slots.pieces(cold.row_bytes):
        owners, local = cold.locate(slots, piece)
        holders = slots.holders[piece]
        in_node = owners // ranks_per_node == rank // ranks_per_node
        to_owner, num_sent = _grouped(
            owners % ranks_per_node, in_node & (holders == rank % ranks_per_node), ranks_per_node
        )
        from_holder, num_received = _grouped(holders, owners == rank, ranks_per_node)
        rows = copies.index_select(0, slots.slots[piece][to_owner].to(copies.device))
        if ranks_per_node > 1:
            rows = _exchange(rows, num_sent, num_received, node)
        cold.write(slots.tables[piece][from_holder], local[from_holder], rows)


def _grouped(keys: Tensor, chosen: Tensor, num_keys: int) -> tuple[Tensor, list[int]]:
    """Return the positions that are ``chosen``, by key and in order, and how many have each key."""
    positions = chosen.nonzero().squeeze(1)
    keys = keys[positions]
    counts: list[int] = torch.bincount(keys, minlength=num_keys).tolist()
    return positions[torch.argsort(keys, stable=True)], counts


def _exchange(
    values: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    received = values.new_empty((sum(receive), *values.shape[1:]))
    dist.all_to_all_single(received, values, receive, send, group=group)
    return received


class CopiedRows:
    """Moves weights and optimizer state between the tables and the overlays.

    Every method but ``ask`` and ``take_back`` is a collective call.

    Attributes:
        index: which rows the overlays hold now.
    """

    def __init__(
        self,
        weights: dict[str, ShardedTensor],
        optimizer: CombinedOptimizer,
        hot: Overlay,
        flex: Overlay,
        index: TierIndex,
        groups: TierGroups,
    ) -> None:
        self.index = index
        self._hot, self._flex, self._groups = hot, flex, groups
        tables = list(index.tiers)
        blocks = [RowBlocks.of(table, weights[table].metadata()) for table in tables]
        shards = [_local(weights[table], hot.weights) for table in tables]
        self._cold = [ColdRows(blocks, shards)]
        self._copies = [(hot.weights, flex.weights)]
        if hot.state is not None and flex.state is not None:
            states = [
                _optimizer_state(optimizer, table, shard)
                for table, shard in zip(tables, shards, strict=True)
            ]
            self._cold.append(ColdRows(blocks, states))
            self._copies.append((hot.state, flex.state))
        self._folded = -1
        self._is_out = False
        self._was_asked = False

    @torch.no_grad()
    def fold(self) -> None:
        """Write the copies into the tables, unless they have not learned since the last time."""
        if self._folded == self._num_updates:
            return
        for cold, of_tiers in zip(self._cold, self._copies, strict=True):
            for copies, slots in zip(of_tiers, _slots(self.index), strict=True):
                fold(copies, slots, cold, self._groups.flex)
        self._folded = self._num_updates

    def lend(self) -> None:
        """Fold for a state dict, whose tensors may be filled in place.

        The copies follow in the next lookup, if they have not learned in between.
        """
        self.fold()
        self._is_out = self._was_asked = True

    def take_back(self) -> None:
        """Nobody has kept a state dict."""
        self._is_out = self._was_asked = False

    def ask(self) -> None:
        """Note that tensors of a state dict are read or written, perhaps on this rank alone."""
        if self._folded != self._num_updates:
            raise ExactnessError(
                "tensors of a state dict were asked for that was taken before the last backward "
                f"pass: those of tables {', '.join(self.index.tiers)}, which have tiers, lack what "
                "copies of their rows have learned since. Take a new one, by state_dict() of the "
                "model or of its optimizer on all ranks, where you save, read or fill it"
            )
        self._was_asked = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the copies from the tables."""
        # Not the tiers' groups, whose traffic is that of steps.
        world = dist.group.WORLD
        assert world is not None
        for cold, of_tiers in zip(self._cold, self._copies, strict=True):
            for copies, slots in zip(of_tiers, _slots(self.index), strict=True):
                refresh(copies, slots, cold, world)
        self._folded = self._num_updates
        self._was_asked = False

    def hold(self, index: TierIndex) -> None:
        """Have the overlays hold the rows of ``index``, which has as many as the one before."""
        if index is self.index:
            if self._is_out and self._folded == self._num_updates and self._any_was_asked():
                self.refresh()
            return
        self.fold()
        self.index = index
        self._hot.hold(index.hot_rows())
        self._flex.hold(index.flex_rows(self._groups.flex.rank()))
        self.refresh()

    def _any_was_asked(self) -> bool:
        """Return whether some rank was: all refresh together."""
        asked = self._hot.weights.new_tensor(float(self._was_asked))
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)

    @property
    def _num_updates(self) -> int:
        return self._hot.num_updates + self._flex.num_updates


class FoldingOptimizer(CombinedOptimizer):
    """The fused optimizer of the tables, whose state includes the updates of the copies.

    Names, shapes and types are TorchRec's. All ranks read ``state`` together, as ``state_dict`` and
    ``load_state_dict`` of it and of any optimizer around it do.
    """

    def __init__(
        self, optimizer: CombinedOptimizer, lend: Callable[[], None], refresh: Callable[[], None]
    ) -> None:
        super().__init__(list(optimizer.optimizers))
        self._lend = lend
        self._refresh = refresh

    # An optimizer around this one asks for the state, and for nothing else, in its state_dict.
    @property
    def state(self) -> Any:
        """The state by parameter."""
        self._lend()
        return super().state

    def post_load_state_dict(self) -> None:
        """Called after loading, by an optimizer around this one too."""
        super().post_load_state_dict()
        self._refresh()


def _slots(index: TierIndex) -> tuple[Slots, Slots]:
    """Return the hot and the flex rows of all tables, as ``TierIndex`` places them."""
    hot = [torch.from_numpy(tiers.hot.copy()) for tiers in index.tiers.values()]
    flex = [torch.from_numpy(tiers.flex.copy()) for tiers in index.tiers.values()]
    places, node = torch.arange(index.num_flex), index.ranks_per_node
    every = torch.arange(index.num_hot)
    return (
        Slots(_tables(hot), torch.cat(hot), torch.zeros_like(every), every, 1),
        Slots(_tables(flex), torch.cat(flex), places % node, places // node, node),
    )


def _tables(rows: list[Tensor]) -> Tensor:
    return torch.arange(len(rows)).repeat_interleave(torch.tensor([len(each) for each in rows]))


def _rank(placement: Any) -> int:
    return int(placement.rank())


def _local(tensor: ShardedTensor, like: Tensor) -> Tensor:
    shards = tensor.local_shards()
    return shards[0].tensor if shards else like[:0]


def set_group(
    weights: Mapping[str, ShardedTensor],
    optimizer: CombinedOptimizer,
    group: dist.ProcessGroup,
) -> None:
    """Give the tensors of state dicts the trainer's group, which a copy of them needs."""
    states = (tensor for by_name in optimizer.state.values() for tensor in by_name.values())
    for tensor in (*weights.values(), *states):
        if isinstance(tensor, ShardedTensor):
            tensor._process_group = group


def _optimizer_state(optimizer: CombinedOptimizer, table: str, weights: Tensor) -> Tensor:
    """Return the sums of row-wise Adagrad, ``[rows]``; zeros for a table with SGD."""
    states = optimizer.state[optimizer.params[f"embeddings.{table}.weight"]].values()
    for state in states:
        return _local(state, weights.new_empty(0))
    return weights.new_zeros(len(weights))
