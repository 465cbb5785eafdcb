"""Transfer of rows between row-wise shards and the copies of frequent rows on other ranks.

Rows are copied bit for bit, at most ``PIECE_BYTES`` at a time. Checkpoints contain only the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer

from recd_plugin_flexshard.runtime.overlay import Overlay
from recd_plugin_flexshard.runtime.split import TierIndex
from recd_plugins.api import ExactnessError, rank_agreement

PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class TierGroups:
    """Separate process groups for hot, flex and cold rows, so that their bytes can be counted.

    Attributes:
        cold: all ranks, for all-to-alls of the row-wise shards.
        hot: all ranks, to sum the gradients of hot rows.
        flex: the ranks of this node, for all-to-alls of flex rows.
        flex_gradients: ranks with copies of the same flex rows, to sum their gradients.
    """

    cold: dist.ProcessGroup
    hot: dist.ProcessGroup
    flex: dist.ProcessGroup
    flex_gradients: dist.ProcessGroup

    @property
    def names(self) -> dict[str, str]:
        """Return a dict from process group name to ``cold``, ``hot``, ``flex``, ..."""
        return {getattr(self, each.name).group_name: each.name for each in fields(self)}


# Keyed by the default process group, so that an entry ends with its default group.
_made: WeakKeyDictionary[dist.ProcessGroup, TierGroups] = WeakKeyDictionary()


def tier_groups() -> TierGroups:
    """Return the process groups for rows copied to every rank, to every node, or not copied.

    The first call is collective, because it creates the groups. A node consists of
    ``LOCAL_WORLD_SIZE`` consecutive ranks, as in TorchRec.
    """
    world = dist.group.WORLD
    assert world is not None, "call torch.distributed.init_process_group first"
    if world not in _made:
        local, everyone = rank_agreement.ranks_of_each_node(), list(range(dist.get_world_size()))
        cold, hot = (rank_agreement.new_group(everyone) for _ in range(2))
        # Every rank must create every group.
        nodes = [
            rank_agreement.new_group(everyone[i : i + local])
            for i in range(0, len(everyone), local)
        ]
        across = [rank_agreement.new_group(everyone[i::local]) for i in range(local)]
        rank = dist.get_rank()
        _made[world] = TierGroups(cold, hot, nodes[rank // local], across[rank % local])
    return _made[world]


@dataclass(frozen=True)
class _Move:
    """Locations of n rows of one table, in the row-wise shards and among the hot or flex copies.

    Index tensors are int64 ``[n]`` on the CPU.

    Attributes:
        shard: this rank's shard of the table, either weights or optimizer state.
        copies: this rank's hot or flex copies, either weights or optimizer state.
        owners: rank whose shard contains each row.
        local: index of each row in the owner's shard.
        holders: local rank that has the copy of each row.
        slots: index of each row among the copies of its holder.
        node: ranks per node for flex rows, 1 for hot rows.
    """

    shard: Tensor
    copies: Tensor
    owners: Tensor
    local: Tensor
    holders: Tensor
    slots: Tensor
    node: int

    def refresh(self, world: dist.ProcessGroup) -> None:
        """Overwrite the copies with the rows of the table. All ranks must call this."""
        rank, nodes = dist.get_rank(), dist.get_world_size() // self.node
        sent, num_sent = _grouped(self.holders, self.owners == rank, self.node)
        got, num_got = _grouped(self.owners, self.holders == rank % self.node, self.node * nodes)
        rows = self._read(self.shard, self.local[sent].repeat(nodes))
        received = _exchange(rows, num_sent * nodes, num_got, world)
        self.copies.index_copy_(0, self.slots[got].to(self.copies.device), received)

    def fold(self, group: dist.ProcessGroup) -> None:
        """Overwrite the rows of the table with the copies. All ranks must call this."""
        rank, node = dist.get_rank(), self.node
        sent = (self.owners // node == rank // node) & (self.holders == rank % node)
        to_owner, num_sent = _grouped(self.owners % node, sent, node)
        mine, num_got = _grouped(self.holders, self.owners == rank, node)
        rows = self._read(self.copies, self.slots[to_owner])
        if node > 1:
            rows = _exchange(rows, num_sent, num_got, group)
        # A batch in flight did not read these rows of the table, so autograd's version counter
        # must not change. detach() would share the counter.
        self.shard.data.index_copy_(0, self.local[mine].to(self.shard.device), rows)

    @staticmethod
    def _read(values: Tensor, places: Tensor) -> Tensor:
        return values.detach().index_select(0, places.to(values.device))


def _grouped(keys: Tensor, chosen: Tensor, num_keys: int) -> tuple[Tensor, list[int]]:
    """Return the indices where ``chosen`` is True, sorted by key, and their number per key."""
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
    """Keeps sharded tables and the row copies on other ranks equal, with optimizer state.

    All methods except ``ask`` and ``take_back`` are collective calls.

    Attributes:
        index: the rows that currently have copies.
        mark: called with a table and its copied rows after ``fold`` has changed these rows.
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
        self._blocks = {
            table: -(-weights[table].size(0) // groups.cold.size()) for table in index.tiers
        }
        shards = {table: _local(weights[table], hot.weights) for table in index.tiers}
        self._stores = [(shards, hot.weights, flex.weights)]
        if hot.state is not None and flex.state is not None:
            states = {t: _optimizer_state(optimizer, t, shard) for t, shard in shards.items()}
            self._stores.append((states, hot.state, flex.state))
        self._folded = -1
        self.mark: Callable[[str, Tensor], None] | None = None
        self._is_out = False
        self._was_asked = False

    def _moves(self) -> Iterator[_Move]:
        """Yield the locations of all copied rows in pieces, first for weights, then for state.

        All ranks yield the same pieces in the same order.
        """
        for shards, hot, flex in self._stores:
            row_bytes = hot.element_size() * max(1, hot.shape[1:].numel())
            step = max(1, PIECE_BYTES // (row_bytes * self._groups.cold.size()))
            for copies, tier, node in ((hot, "hot", 1), (flex, "flex", self.index.ranks_per_node)):
                first = 0
                for table, tiers in self.index.tiers.items():
                    rows = torch.from_numpy(getattr(tiers, tier).copy())
                    for start in range(0, len(rows), step):
                        piece = rows[start : start + step]
                        places = first + start + torch.arange(len(piece))
                        block = self._blocks[table]
                        yield _Move(
                            shards[table],
                            copies,
                            piece // block,
                            piece % block,
                            places % node,
                            places // node,
                            node,
                        )
                    first += len(rows)

    @torch.no_grad()
    def fold(self) -> None:
        """Write the copies into the tables, if training changed the copies since the last call."""
        if self._folded == self._num_updates:
            return
        for move in self._moves():
            move.fold(self._groups.flex)
        self._folded = self._num_updates
        if (mark := self.mark) is not None:
            for table, tiers in self.index.tiers.items():
                mark(table, torch.from_numpy(np.concatenate([tiers.hot, tiers.flex])))

    def lend(self) -> None:
        """Write the copies into the tables before a state dict exposes the tables' tensors.

        The caller may overwrite these tensors in place, so the next lookup refreshes the copies
        from the tables.
        """
        self.fold()
        self._is_out = self._was_asked = True

    def take_back(self) -> None:
        """Cancel the refresh planned by ``lend``, as the caller has dropped the state dict."""
        self._is_out = self._was_asked = False

    def ask(self) -> None:
        """Record that the caller reads or writes tensors of a state dict on this rank.

        Raises:
            ExactnessError: training changed the copies after the state dict was created.
        """
        if self._folded != self._num_updates:
            raise ExactnessError(
                "state dict: created before the last backward pass, so updates of the tables "
                f"{', '.join(map(repr, self.index.tiers))} are missing. Call state_dict() on all "
                "ranks again before you read or write tensors of a state dict."
            )
        self._was_asked = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Overwrite the copies with the current rows of the tables."""
        # The bytes of other process groups are reported as traffic of training steps.
        world = dist.group.WORLD
        assert world is not None
        for move in self._moves():
            move.refresh(world)
        self._folded = self._num_updates
        self._was_asked = False

    def hold(self, index: TierIndex) -> None:
        """Replace the copied rows by the rows of ``index``, which must have equally many rows."""
        if index is self.index:
            if self._is_out and self._folded == self._num_updates:
                # All ranks refresh if one rank needs it.
                asked = self._hot.weights.new_tensor(float(self._was_asked))
                dist.all_reduce(asked, dist.ReduceOp.MAX)
                if asked:
                    self.refresh()
            return
        self.fold()
        self.index = index
        self._hot.hold(index.hot_rows())
        self._flex.hold(index.flex_rows(self._groups.flex.rank()))
        self.refresh()

    @property
    def _num_updates(self) -> int:
        return self._hot.num_updates + self._flex.num_updates


class FoldingOptimizer(CombinedOptimizer):
    """TorchRec's fused optimizer of the tables, with the optimizer state of copied rows included.

    Names, shapes and types are the same as in TorchRec. ``state`` is a collective call, and so are
    ``state_dict`` and ``load_state_dict`` of this optimizer and of optimizers that wrap it.
    """

    def __init__(
        self, optimizer: CombinedOptimizer, lend: Callable[[], None], refresh: Callable[[], None]
    ) -> None:
        super().__init__(list(optimizer.optimizers))
        self._lend = lend
        self._refresh = refresh

    # A wrapping optimizer reads the state only in its state_dict.
    @property
    def state(self) -> Any:
        """Return the optimizer state, keyed by parameter. All ranks must read this property."""
        self._lend()
        return super().state

    def post_load_state_dict(self) -> None:
        """Overwrite the row copies with the loaded tables and state. All ranks must call this."""
        super().post_load_state_dict()
        self._refresh()


def _local(tensor: ShardedTensor, like: Tensor) -> Tensor:
    shards = tensor.local_shards()
    return shards[0].tensor if shards else like[:0]


def set_group(
    weights: Mapping[str, ShardedTensor],
    optimizer: CombinedOptimizer,
    group: dist.ProcessGroup,
) -> None:
    """Set the process group of all ShardedTensors in weights and optimizer state.

    ``copy.deepcopy`` of a state dict fails unless its tensors have the trainer's process group.
    """
    states = (tensor for by_name in optimizer.state.values() for tensor in by_name.values())
    for tensor in (*weights.values(), *states):
        if isinstance(tensor, ShardedTensor):
            tensor._process_group = group


def _optimizer_state(optimizer: CombinedOptimizer, table: str, weights: Tensor) -> Tensor:
    """Return row-wise Adagrad's sums of squares for this rank's shard, ``[rows]``; 0 with SGD."""
    states = optimizer.state[optimizer.params[f"embeddings.{table}.weight"]].values()
    for state in states:
        return _local(state, weights.new_empty(0))
    return weights.new_zeros(len(weights))
