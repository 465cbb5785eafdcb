"""Row exchanges on one rank, against plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from recd_plugin_flexshard.runtime import rows as exchange
from recd_plugin_flexshard.runtime.rows import ColdRows, RowBlocks, Slots
from recd_plugins.testing.fake_device import fake_device


@dataclass(frozen=True)
class Case:
    """Tables by their numbers of rows; the ranks hold even blocks of them, the last ones less."""

    num_rows: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_hot: int
    num_flex: int
    piece_bytes: int = 64 << 20


def exchange_rows_on_another_device(
    rank: int, world_size: int, case: Case, ranks_per_node: int
) -> list[str]:
    """The same, where nothing of the CPU's may come in."""
    with fake_device() as device:
        return exchange_rows(rank, world_size, case, ranks_per_node, device)


def exchange_rows_on_cuda(rank: int, world_size: int, case: Case, ranks_per_node: int) -> list[str]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return exchange_rows(rank, world_size, case, ranks_per_node, device)


def exchange_rows(
    rank: int,
    world_size: int,
    case: Case,
    ranks_per_node: int,
    device: torch.device | str = "cpu",
) -> list[str]:
    """What is wrong on this rank, if anything."""
    exchange.PIECE_BYTES = case.piece_bytes
    node = _node_group(world_size, ranks_per_node)
    random = torch.Generator().manual_seed(7)
    whole = [_values((rows, *case.shape), case.dtype, random) for rows in case.num_rows]
    blocks = [_even_blocks(rows, world_size) for rows in case.num_rows]
    bounds = [_bounds(rows, rank, world_size) for rows in case.num_rows]
    shards = [table[bound].clone().to(device) for table, bound in zip(whole, bounds, strict=True)]
    cold = ColdRows(blocks, shards)
    hot_slots, flex_slots = _choose(case, ranks_per_node, random)
    hot = torch.zeros((case.num_hot, *case.shape), dtype=case.dtype, device=device)
    per_rank = -(-case.num_flex // ranks_per_node)
    flex = torch.zeros((per_rank, *case.shape), dtype=case.dtype, device=device)
    world = dist.group.WORLD
    assert world is not None
    wrong = []

    exchange.refresh(hot, hot_slots, cold, world)
    exchange.refresh(flex, flex_slots, cold, world)
    mine = flex_slots.holders == rank % ranks_per_node
    if not _same(hot[hot_slots.slots], _rows(whole, hot_slots)):
        wrong.append("refreshed hot rows")
    if not _same(flex[flex_slots.slots[mine]], _rows(whole, flex_slots)[mine]):
        wrong.append("refreshed flex rows")

    # The same on all ranks, as training leaves them.
    new = [_values(tuple(table.shape), case.dtype, random) for table in whole]
    hot[hot_slots.slots] = _rows(new, hot_slots).to(device)
    flex[flex_slots.slots[mine]] = _rows(new, flex_slots)[mine].to(device)
    exchange.fold(hot, hot_slots, cold, node)
    exchange.fold(flex, flex_slots, cold, node)
    for slots in (hot_slots, flex_slots):
        for table, row in zip(slots.tables.tolist(), slots.rows.tolist(), strict=True):
            whole[table][row] = new[table][row]
    for table, (shard, bound) in enumerate(zip(shards, bounds, strict=True)):
        if not _same(shard, whole[table][bound]):
            wrong.append(f"folded table {table}")
    return wrong


def _choose(case: Case, ranks_per_node: int, random: torch.Generator) -> tuple[Slots, Slots]:
    """Other rows for each tier, hot slots in any order, flex rows dealt over the ranks."""
    every = [(table, row) for table, rows in enumerate(case.num_rows) for row in range(rows)]
    order = torch.randperm(len(every), generator=random)[: case.num_hot + case.num_flex]
    chosen = torch.tensor([every[i] for i in order], dtype=torch.int64).view(-1, 2)
    hot, flex = chosen.split([case.num_hot, case.num_flex])
    places, node = torch.arange(case.num_flex), ranks_per_node
    in_any_order = torch.randperm(case.num_hot, generator=random)
    return (
        Slots(hot[:, 0], hot[:, 1], torch.zeros_like(in_any_order), in_any_order, 1),
        Slots(flex[:, 0], flex[:, 1], places % node, places // node, node),
    )


def _rows(tables: list[Tensor], slots: Slots) -> Tensor:
    pairs = zip(slots.tables.tolist(), slots.rows.tolist(), strict=True)
    rows = [tables[table][row] for table, row in pairs]
    return torch.stack(rows) if rows else tables[0][:0]


def _values(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=random).to(dtype)
    special = torch.tensor([-0.0, float("nan"), float("inf"), 1e-40]).to(dtype)
    flat = values.view(-1)
    flat[::3] = special[torch.randint(4, flat[::3].shape, generator=random)]
    return values


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    one, other = (each.cpu().contiguous() for each in (one, other))
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _bounds(num_rows: int, rank: int, world_size: int) -> slice:
    step = -(-num_rows // world_size)
    return slice(min(num_rows, rank * step), min(num_rows, (rank + 1) * step))


def _even_blocks(num_rows: int, world_size: int) -> RowBlocks:
    bounds = [_bounds(num_rows, rank, world_size) for rank in range(world_size)]
    full = [(bound.start, rank) for rank, bound in enumerate(bounds) if bound.start < bound.stop]
    starts, ranks = torch.tensor(full, dtype=torch.int64).unbind(1)
    return RowBlocks(starts, ranks)


def _node_group(world_size: int, ranks_per_node: int) -> dist.ProcessGroup:
    nodes = torch.arange(world_size).view(-1, ranks_per_node).tolist()
    groups = [dist.new_group(node) for node in nodes]
    return groups[dist.get_rank() // ranks_per_node]
