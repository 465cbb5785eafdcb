"""A sharded EmbeddingCollection with copies of its hot rows on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recd_plugin_hotrows.collection import HotCollection
from recd_plugin_hotrows.split import HotContext, Joined, split
from recd_plugins.api import (
    ExactEmbeddingCollectionSharder,
    ExactnessError,
    ExactShardedEmbeddingCollection,
    SetupError,
)


class ShardedHotCollection(ExactShardedEmbeddingCollection):
    """Looks up frequent rows in local copies, and other rows in the sharded tables.

    State dicts contain only the tables, with the updates of the copies.
    """

    def __init__(
        self,
        module: HotCollection,
        plan: dict[str, Any],
        env: Any,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        **arguments: Any,
    ) -> None:
        others = (fused_params or {}).keys() - {"optimizer", "learning_rate"}
        if others or (fused_params or {}).get("optimizer") != EmbOptimType.EXACT_SGD:
            raise SetupError(f"hot rows support only SGD, but fused_params are {fused_params}.")
        super().__init__(module, plan, env, fused_params, device, **arguments)
        self._first: dict[str, int] = {}  # key of row 0 of each feature's table
        self._tables: dict[str, tuple[Tensor, int]] = {}  # hot rows, index of the first copy
        keys, start, slot = [], 0, 0
        for config in module.embedding_configs():
            self._first |= dict.fromkeys(config.feature_names, start)
            if (rows := module.hot.get(config.name)) is not None:
                self._tables[config.name] = rows, slot
                keys.append(rows + start)
                slot += len(rows)
            start += config.num_embeddings
        self._keys = torch.cat(keys).to(device)
        self._hot = torch.zeros(slot, module.embedding_dim(), device=device)
        self._has_learned = False
        self.group = dist.new_group()
        self.register_state_dict_post_hook(lambda self, state, prefix, _: self._fold(state, prefix))
        self.register_load_state_dict_post_hook(lambda self, _: self._refresh())
        self._refresh()

    def create_context(self) -> HotContext:
        return HotContext()

    def distribute(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        if features.variable_stride_per_key():
            raise ExactnessError("hot rows do not support deduplicated input. Remove use_vbe.")
        ctx.split, cold = split(features, self._first, self._keys)
        return super().distribute(ctx, cold)

    def look_up(self, ctx: Any, input: Any) -> Any:
        hot = self._hot.detach().requires_grad_(torch.is_grad_enabled())
        if hot.requires_grad:
            hot.register_hook(self._learn)
        return Joined(ctx.split, super().look_up(ctx, input), hot[ctx.split.slots])

    @torch.no_grad()
    def _learn(self, gradient: Tensor) -> None:
        """Update the copies by SGD with the mean gradient over ranks, as for sharded rows."""
        dist.all_reduce(gradient := gradient.clone(), group=self.group)
        rate = self.fused_optimizer.param_groups[0]["lr"]
        self._hot.sub_(gradient.div_(self.group.size()), alpha=rate)
        self._has_learned = True

    def _shards(self, state: Mapping[str, Any], prefix: str) -> Iterator[tuple[Any, ...]]:
        """Yield each local shard with hot rows, as four values.

        The values are the shard's weights, the indices of hot rows in the shard, and the rows and
        the column slice of their copies.
        """
        for table, (rows, slot) in self._tables.items():
            for shard in state[f"{prefix}embeddings.{table}.weight"].local_shards():
                row, column = shard.metadata.shard_offsets
                num_rows, width = shard.metadata.shard_sizes
                here = (rows >= row) & (rows < row + num_rows)
                slots = slot + here.nonzero().view(-1)
                yield shard.tensor, rows[here] - row, slots, slice(column, column + width)

    @torch.no_grad()
    def _fold(self, state: Mapping[str, Any], prefix: str) -> None:
        """Write the updated copies into the tables."""
        if self._has_learned:
            for weights, rows, slots, columns in self._shards(state, prefix):
                weights[rows] = self._hot[slots, columns]

    @torch.no_grad()
    def _refresh(self) -> None:
        """Overwrite the copies with the rows of the tables. All ranks must call this."""
        self._has_learned = False
        self._hot.zero_()
        for weights, rows, slots, columns in self._shards(self.state_dict(), ""):
            self._hot[slots, columns] = weights[rows]
        dist.all_reduce(self._hot)


class HotSharder(ExactEmbeddingCollectionSharder):
    """Sharder of ``HotCollection`` modules."""

    @property
    def module_type(self) -> type[HotCollection]:
        return HotCollection

    @property
    def sharded_module_type(self) -> type[ShardedHotCollection]:
        return ShardedHotCollection
