"""Moves rows between a table's row-wise shards and the copies that hot and flex tiers keep.

Everything is copied bit for bit, whatever the type, and with bounded temporaries: rows travel in
pieces of ``PIECE_BYTES`` at most. All ranks call the collective functions together, with the same
rows in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata

from recd_plugins.api import SetupError

PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class RowBlocks:
    """Which rank holds which rows of a table.

    Attributes:
        starts: first row of each block, ascending, int64 on the CPU; empty blocks are left out.
        ranks: the rank of each block, int64 on the CPU.
        num_rows: of the table.
    """

    starts: Tensor
    ranks: Tensor
    num_rows: int

    @classmethod
    def of(cls, table: str, metadata: ShardedTensorMetadata) -> RowBlocks:
        """Read the blocks from the metadata of a ShardedTensor, of weights or of row-wise state.

        Raises:
            SetupError: the table is not split by rows with one block a rank.
        """
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
        starts = torch.tensor([start for start, _, _ in blocks], dtype=torch.int64)
        return cls(starts, torch.tensor(ranks, dtype=torch.int64), int(metadata.size[0]))

    def locate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rank that holds each of ``rows``, and the row's place in that rank's shard."""
        block = torch.searchsorted(self.starts, rows, right=True) - 1
        return self.ranks[block], rows - self.starts[block]


@dataclass(frozen=True)
class Slots:
    """What the rows of an overlay are copies of. Tensors are int64 on the CPU, one entry a row.

    Attributes:
        tables: index of the table.
        rows: of the table.
        holders: the rank within its node that holds the copy; None where all ranks do.
        slots: the copy's row in the overlay's matrix on the ranks that hold it.
    """

    tables: Tensor
    rows: Tensor
    holders: Tensor | None
    slots: Tensor

    def __len__(self) -> int:
        return self.rows.numel()


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
        """The owner of each of these slots' cold rows, and the row's place in the owner's shard."""
        tables, rows = slots.tables[piece], slots.rows[piece]
        owners, local = torch.empty_like(rows), torch.empty_like(rows)
        for table, blocks in enumerate(self.blocks):
            here = tables == table
            owners[here], local[here] = blocks.locate(rows[here])
        return owners, local

    def read(self, tables: Tensor, local: Tensor) -> Tensor:
        """Copies of this rank's rows ``local`` of ``tables``, in that order."""
        shard = self.shards[0]
        values = shard.new_empty((local.numel(), *shard.shape[1:]))
        for table, shard in enumerate(self.shards):
            here = (tables == table).nonzero().squeeze(1)
            if here.numel():
                source = shard.detach().index_select(0, local[here].to(shard.device))
                values.index_copy_(0, here.to(shard.device), source)
        return values

    def write(self, tables: Tensor, local: Tensor, values: Tensor) -> None:
        """Overwrite this rank's rows ``local`` of ``tables``, which are looked up as copies only.

        So rows of a batch that was looked up already are not among them, and its backward pass is
        not to take the table for a changed one.
        """
        for table, shard in enumerate(self.shards):
            here = (tables == table).nonzero().squeeze(1)
            if here.numel():
                source = values.index_select(0, here.to(values.device))
                # Not detach(), which shares the count of changes that autograd compares.
                shard.data.index_copy_(0, local[here].to(shard.device), source)


def refresh_hot(hot: Tensor, slots: Slots, cold: ColdRows, group: dist.ProcessGroup) -> None:
    """Overwrite the hot rows, on every rank, with the cold ones of their owners.

    Args:
        hot: ``[hot rows, ...]`` as ``cold``.
        slots: all hot rows.
        cold: of this rank.
        group: all ranks.
    """
    rank = dist.get_rank()
    for piece in _pieces(len(slots), cold.row_bytes):
        owners, local = cold.locate(slots, piece)
        mine = (owners == rank).nonzero().squeeze(1)
        values = hot.new_zeros((owners.numel(), *hot.shape[1:]))
        values.index_copy_(
            0, mine.to(hot.device), cold.read(slots.tables[piece][mine], local[mine])
        )
        # Each row is zero but on its owner. A sum of bytes keeps -0.0 and the payload of a NaN.
        dist.all_reduce(values.view(-1).view(torch.uint8), group=group)
        hot.index_copy_(0, slots.slots[piece].to(hot.device), values)


def fold_hot(hot: Tensor, slots: Slots, cold: ColdRows) -> None:
    """Overwrite the cold rows that this rank owns with their hot copies. Nothing is sent."""
    rank = dist.get_rank()
    for piece in _pieces(len(slots), cold.row_bytes):
        owners, local = cold.locate(slots, piece)
        mine = (owners == rank).nonzero().squeeze(1)
        values = hot.index_select(0, slots.slots[piece][mine].to(hot.device))
        cold.write(slots.tables[piece][mine], local[mine], values)


def refresh_flex(
    flex: Tensor, slots: Slots, cold: ColdRows, group: dist.ProcessGroup, ranks_per_node: int
) -> None:
    """Overwrite this rank's flex rows with the cold ones of their owners, on all nodes.

    Args:
        flex: ``[flex rows of this rank, ...]`` as ``cold``.
        slots: the flex rows of all ranks of a node; the same on every node.
        cold: of this rank.
        group: all ranks, node by node.
        ranks_per_node: of each node.
    """
    assert slots.holders is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_nodes = world_size // ranks_per_node
    for piece in _pieces(len(slots), cold.row_bytes * num_nodes):
        owners, local = cold.locate(slots, piece)
        holders = slots.holders[piece]
        to_node, num_sent = _grouped(holders, owners == rank, ranks_per_node)
        from_owner, num_received = _grouped(owners, holders == rank % ranks_per_node, world_size)
        to_all = to_node.repeat(num_nodes)
        received = _exchange(
            cold.read(slots.tables[piece][to_all], local[to_all]),
            num_sent * num_nodes,
            num_received,
            group,
        )
        flex.index_copy_(0, slots.slots[piece][from_owner].to(flex.device), received)


def fold_flex(
    flex: Tensor, slots: Slots, cold: ColdRows, group: dist.ProcessGroup, ranks_per_node: int
) -> None:
    """Overwrite the cold rows that this rank owns with the flex copies of its own node.

    Args:
        flex: ``[flex rows of this rank, ...]`` as ``cold``.
        slots: the flex rows of all ranks of a node; the same on every node.
        cold: of this rank.
        group: the ranks of this node.
        ranks_per_node: of each node.
    """
    assert slots.holders is not None
    rank = dist.get_rank()
    for piece in _pieces(len(slots), cold.row_bytes):
        owners, local = cold.locate(slots, piece)
        holders = slots.holders[piece]
        in_node = owners // ranks_per_node == rank // ranks_per_node
        to_owner, num_sent = _grouped(
            owners % ranks_per_node, in_node & (holders == rank % ranks_per_node), ranks_per_node
        )
        from_holder, num_received = _grouped(holders, owners == rank, ranks_per_node)
        received = _exchange(
            flex.index_select(0, slots.slots[piece][to_owner].to(flex.device)),
            num_sent,
            num_received,
            group,
        )
        cold.write(slots.tables[piece][from_holder], local[from_holder], received)


def _grouped(keys: Tensor, chosen: Tensor, num_keys: int) -> tuple[Tensor, list[int]]:
    """The positions that are ``chosen``, by key and in order, and how many have each key."""
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


def _pieces(num_rows: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, PIECE_BYTES // row_bytes)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def _rank(placement: object) -> int:
    rank = getattr(placement, "rank", lambda: None)()
    assert rank is not None, placement
    return int(rank)
