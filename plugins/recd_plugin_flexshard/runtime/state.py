"""Copies and tables in step: checkpoints are those of the tables, rows move between tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer

from recd_plugin_flexshard.runtime.exchange import (
    ColdRows,
    RowBlocks,
    Slots,
    fold_flex,
    fold_hot,
    refresh_flex,
    refresh_hot,
)
from recd_plugin_flexshard.runtime.groups import TierGroups
from recd_plugin_flexshard.runtime.overlay import Overlay
from recd_plugin_flexshard.runtime.split import TierIndex
from recd_plugins.api import ExactnessError


class CopiedRows:
    """Moves weights and optimizer state between the tables and the overlays.

    Every method but ``ask`` and ``take_back`` is a collective call. Copies are bit for bit.

    Args:
        weights: by table, what the sharded collection has in its state dict.
        optimizer: of the sharded collection; has the tables' optimizer state.
        hot: holds the hot rows of ``index``.
        flex: holds this rank's flex rows of ``index``.
        index: which rows those are.
        groups: of the tiers.

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
        hot_slots, flex_slots = _slots(self.index)
        node = self._groups.flex
        for cold, (hot, flex) in zip(self._cold, self._copies, strict=True):
            fold_hot(hot, hot_slots, cold)
            fold_flex(flex, flex_slots, cold, node, node.size())
        self._folded = self._num_updates

    def lend(self) -> None:
        """Fold, for one who may write into the tables, as those who fill a state dict in place do.

        The copies follow in the next lookup, if they have not learned in between.
        """
        self.fold()
        self._is_out = self._was_asked = True

    def take_back(self) -> None:
        """Nobody has kept what was lent."""
        self._is_out = self._was_asked = False

    def ask(self) -> None:
        """Somebody, on this rank alone perhaps, reads or writes tables that were lent before.

        Raises:
            ExactnessError: the copies have learned since; to fold takes all ranks.
        """
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
        hot_slots, flex_slots = _slots(self.index)
        # Not the tiers' groups, whose traffic is that of steps.
        world = dist.group.WORLD
        assert world is not None
        for cold, (hot, flex) in zip(self._cold, self._copies, strict=True):
            refresh_hot(hot, hot_slots, cold, world)
            refresh_flex(flex, flex_slots, cold, world, self._groups.flex.size())
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
        """On any rank: all are to refresh together."""
        asked = self._hot.weights.new_tensor(float(self._was_asked))
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)

    @property
    def _num_updates(self) -> int:
        return self._hot.num_updates + self._flex.num_updates


class FoldingOptimizer(CombinedOptimizer):
    """The fused optimizer of the tables, whose state has what the copies learned.

    Its ``state`` is the tables' own: names, shapes and types are TorchRec's. All ranks read it
    together, as ``state_dict`` and ``load_state_dict`` of it and of any optimizer around it do.

    Args:
        optimizer: of the sharded collection.
        lend: before the state is read, or written in place.
        refresh: after a state was loaded.
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
    """Of the hot and of the flex rows of all tables, as ``TierIndex`` places them."""
    hot = [torch.from_numpy(tiers.hot.copy()) for tiers in index.tiers.values()]
    flex = [torch.from_numpy(tiers.flex.copy()) for tiers in index.tiers.values()]
    places = torch.arange(index.num_flex)
    return (
        Slots(_tables(hot), torch.cat(hot), None, torch.arange(index.num_hot)),
        Slots(
            _tables(flex),
            torch.cat(flex),
            places % index.ranks_per_node,
            places // index.ranks_per_node,
        ),
    )


def _tables(rows: list[Tensor]) -> Tensor:
    return torch.arange(len(rows)).repeat_interleave(torch.tensor([len(each) for each in rows]))


def _local(tensor: ShardedTensor, like: Tensor) -> Tensor:
    shards = tensor.local_shards()
    return shards[0].tensor if shards else like[:0]


def set_group(
    weights: Mapping[str, ShardedTensor],
    optimizer: CombinedOptimizer,
    group: dist.ProcessGroup,
) -> None:
    """Make the tensors of state dicts those of the trainer's group, which a copy of them has."""
    states = (tensor for by_name in optimizer.state.values() for tensor in by_name.values())
    for tensor in (*weights.values(), *states):
        if isinstance(tensor, ShardedTensor):
            tensor._process_group = group


def _optimizer_state(optimizer: CombinedOptimizer, table: str, weights: Tensor) -> Tensor:
    """The sums of row-wise Adagrad, ``[rows]``; zeros that nobody reads for a table with SGD."""
    name = f"embeddings.{table}.weight"
    states = optimizer.state[optimizer.params[name]].values()
    for state in states:
        return _local(state, weights.new_empty(0))
    return weights.new_zeros(len(weights))
