"""Row-wise sharded EmbeddingCollections with copies of frequently read rows on other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recd_plugin_flexshard.runtime.collection import TieredEmbeddingCollection
from recd_plugin_flexshard.runtime.flex import FlexLookup, TieredAwaitable, TierInputs
from recd_plugin_flexshard.runtime.overlay import Overlay, update_rules
from recd_plugin_flexshard.runtime.retier import Retiering, RetierReport
from recd_plugin_flexshard.runtime.rows import CopiedRows, FoldingOptimizer, set_group
from recd_plugin_flexshard.runtime.rows import TierGroups as TierGroups
from recd_plugin_flexshard.runtime.rows import tier_groups as tier_groups
from recd_plugin_flexshard.runtime.split import TierIndex, TierSplit, feature_of
from recd_plugin_flexshard.runtime.touched import Wire
from recd_plugins.api import (
    ExactEmbeddingCollectionSharder,
    ExactnessError,
    ExactShardedEmbeddingCollection,
    LookupAhead,
    SetupError,
    batch_forms,
    lookup_kernels,
)


@dataclass
class TieredContext(batch_forms.ExactSequenceContext):
    """TorchRec's context of a batch, with ids split into rows with and without copies."""

    split: TierSplit | None = None
    inputs: TierInputs | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        if self.split is not None:
            self.split.record_stream(stream)
        if self.inputs is not None:
            self.inputs.record_stream(stream)


class ShardedTieredEmbeddingCollection(ExactShardedEmbeddingCollection):
    """Sharded EmbeddingCollection with copies of frequent rows (FlexShard, arXiv 2301.02959).

    Tables are sharded row-wise. Hot rows also have a copy on every rank, and flex rows in every
    node. The backward pass updates the copies with the optimizer and learning rate of their table,
    so training gives the same result as without copies.
    """

    def __init__(
        self,
        module: TieredEmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        **arguments: Any,
    ) -> None:
        _check_plan(module, table_name_to_parameter_sharding)
        self._wire = Wire(arguments.get("qcomm_codecs_registry"), module.embedding_dim())
        self._has_tiers = False  # while the base class loads the tables
        self._tiered = sorted(module.tiers)
        groups = tier_groups()
        super().__init__(
            module,
            table_name_to_parameter_sharding,
            _with_group(env, groups),
            fused_params,
            device,
            **arguments,
        )
        assert env.process_group is not None
        set_group(self._model_parallel_name_to_sharded_tensor, self._optim, env.process_group)
        if self._use_index_dedup:
            raise ExactnessError(
                f"tables {', '.join(map(repr, self._tiered))}: flexshard does not support "
                "use_index_dedup. Set use_index_dedup=False, or do not use flexshard."
            )
        self.groups: TierGroups = groups
        rules = update_rules(self._lookups, module.tiers)
        where = device or torch.device("cpu")
        node = groups.flex
        self.index = TierIndex(module.embedding_configs(), module.tiers, node.size(), where)
        dim = module.embedding_dim()
        hot, flex = self.index.hot_rows(), self.index.flex_rows(node.rank())
        codec, sparse = self._wire.gradients, module.sparse
        self.hot = Overlay(hot, dim, rules, groups.hot, where, sparse="hot" in sparse, codec=codec)
        self.flex = Overlay(
            flex, dim, rules, groups.flex_gradients, where, sparse="flex" in sparse, codec=codec
        )
        self._has_tiers = self.index.num_hot + self.index.num_flex > 0
        self._retiering: Retiering | None = None
        if self._has_tiers and module.retier_every is not None:
            self._retiering = Retiering(module.retier_every)
        if self._has_tiers:
            self._copies = CopiedRows(
                self._model_parallel_name_to_sharded_tensor,
                self._optim,
                self.hot,
                self.flex,
                self.index,
                groups,
            )
        self._register_folding()
        self.refresh()
        if self._has_tiers:
            lookup_kernels.tell_when_asked(self, dict.fromkeys(self._tiered, self._copies.ask))
            self._copies.take_back()

    def register_post_lookup_tracker_fn(self, record_fn: Any) -> None:
        self._refuse_tracker()
        super().register_post_lookup_tracker_fn(record_fn)

    def register_post_odist_tracker_fn(self, record_fn: Any) -> None:
        self._refuse_tracker()
        super().register_post_odist_tracker_fn(record_fn)

    def _refuse_tracker(self) -> None:
        """Reject ModelDeltaTracker, which would miss updates of copies on other ranks."""
        if self._has_tiers:
            raise SetupError(
                "ModelDeltaTracker cannot track changes of flexshard tables: "
                f"{', '.join(map(repr, self._tiered))}. Add these tables to fqns_to_skip."
            )

    def track_changed_rows(self, mark: Callable[[str, Tensor], None]) -> None:
        """Call ``mark`` with a table's copied rows whenever copies are written into the table."""
        if self._has_tiers:
            self._copies.mark = mark

    def create_context(self) -> TieredContext:
        return TieredContext()

    def distribute(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Start to send the ids of a batch to other ranks.

        Ids of rows copied to nodes go only to ranks of this node. Ids of rows copied to every rank
        are not sent.
        """
        if not self._has_tiers:
            return super().distribute(ctx, features)
        assert isinstance(ctx, TieredContext)
        features = maybe_td_to_kjt(features)
        batch_forms.refuse_inverse_indices(features)
        trains = torch.is_grad_enabled()
        with torch.no_grad():
            retiering = self._retiering if self.training else None
            if retiering is not None:
                self.index = retiering.next_index(self.index)
            ctx.split = self.index.split(features)
            if retiering is not None:
                retiering.count(ctx.split)
            awaitable = super().distribute(ctx, ctx.split.cold)
            assert isinstance(awaitable, KJTListSplitsAwaitable)
            ctx.inputs = TierInputs(ctx.split, self.hot, self.flex, self.groups.flex, trains=trains)
            awaitable.awaitables.append(ctx.inputs)
            awaitable._sharding_types.append("flex")
        return awaitable

    def look_up(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        if not self._has_tiers:
            return super().look_up(ctx, input)
        assert isinstance(ctx, TieredContext)
        assert ctx.split is not None
        assert ctx.inputs is not None
        self._copies.hold(ctx.split.index)
        parts = list(input)
        wanted = parts.pop().values()
        cold = super().look_up(ctx, KJTList(parts))
        # With LookupAhead, this batch belongs to a later step, whose rates may still change.
        ahead = any(isinstance(each, LookupAhead) for each in self._lookups)
        flex = hot = None
        if (sizes := ctx.inputs.sizes) is not None:
            flex = FlexLookup(
                self.flex,
                wanted,
                sizes,
                self.groups.flex,
                self._wire,
                ctx.inputs.flex_touched,
                ahead=ahead,
            )
            if self.post_lookup_tracker_fn is not None:
                self._count(wanted, torch.tensor(sizes.received).sum(0))
        if self.index.num_hot:
            hot = self.hot.look_up(ctx.split.hot, ctx.inputs.hot_touched, ahead=ahead)
            if self.post_lookup_tracker_fn is not None:
                of_ids = feature_of(ctx.split.hot_source, ctx.split.lengths)
                per_feature = torch.bincount(of_ids, minlength=len(self.index.features))
                self._count(ctx.split.hot, per_feature)
        return TieredAwaitable(ctx.split, cold, hot, flex, self._need_indices)

    def _count(self, positions: Tensor, per_feature: Tensor) -> None:
        """Pass the indices of looked-up copies to TorchRec's post-lookup tracker function."""
        assert self.post_lookup_tracker_fn is not None
        lengths = per_feature.to(positions.device)
        ids = KeyedJaggedTensor(self.index.features, positions, lengths=lengths)
        self.post_lookup_tracker_fn(ids, positions, self, None)

    def output_dist(
        self, ctx: EmbeddingCollectionContext, output: list[Tensor]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        if not self._has_tiers:
            return super().output_dist(ctx, output)
        raise ExactnessError(
            "output_dist of a sharded TieredEmbeddingCollection would omit the copied rows. "
            "Call compute_and_output_dist instead."
        )

    def reset_parameters(self) -> None:
        self.fold()
        super().reset_parameters()
        self.refresh()

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Return the fused optimizer of the tables. Its state includes updates of row copies."""
        return self._folding_optimizer if self._has_tiers else self._optim

    @property
    def retier_reports(self) -> list[RetierReport]:
        """Return a report for each time that new rows to copy were chosen, in order."""
        return [] if self._retiering is None else self._retiering.reports

    def fold(self) -> None:
        """Write trained row copies into the tables. All ranks must call this."""
        if self._has_tiers:
            self._copies.fold()

    def refresh(self) -> None:
        """Overwrite the row copies with the rows of the tables. All ranks must call this."""
        if self._has_tiers:
            self._copies.refresh()

    def _lend(self) -> None:
        if self._has_tiers:
            self._copies.lend()

    def _register_folding(self) -> None:
        """Register hooks so that state dicts equal those of tables without row copies."""
        self._folding_optimizer = FoldingOptimizer(self._optim, self._lend, self.refresh)
        self.register_state_dict_pre_hook(lambda module, *_: module._lend())
        # If a state dict lacks the optimizer state, keep the state of the copies.
        self._register_load_state_dict_pre_hook(lambda module, *_: module.fold(), with_module=True)
        self.register_load_state_dict_post_hook(lambda module, _: module.refresh())


def _with_group(env: ShardingEnv, groups: TierGroups) -> ShardingEnv:
    if isinstance(env, ShardingEnv2D) or env.world_size != groups.cold.size():
        raise SetupError(
            f"TieredEmbeddingCollection: cannot be sharded over {env.world_size} of "
            f"{groups.cold.size()} ranks or with 2D parallelism. Shard the module over all ranks "
            "of the default process group."
        )
    if getattr(env, "output_dtensor", False):
        raise SetupError(
            "TieredEmbeddingCollection does not support DTensors in state dicts. "
            "Set output_dtensor=False in the ShardingEnv."
        )
    env = copy.copy(env)
    env.process_group = groups.cold
    return env


def _check_plan(module: TieredEmbeddingCollection, plan: dict[str, ParameterSharding]) -> None:
    for table in module.tiers:
        sharding = plan[table]
        if (sharding.sharding_type, sharding.compute_kernel) != (
            ShardingType.ROW_WISE.value,
            EmbeddingComputeKernel.FUSED.value,
        ):
            raise SetupError(
                f"table {table!r}: the sharding plan uses {sharding.sharding_type!r} with the "
                f"compute kernel {sharding.compute_kernel!r}, which flexshard does not support. "
                "Use ParameterConstraints(sharding_types=['row_wise'], "
                "compute_kernels=['fused'])."
            )


class TieredEmbeddingCollectionSharder(ExactEmbeddingCollectionSharder):
    """Sharder of TieredEmbeddingCollection. Other tables may use any sharding type.

    ``shard`` raises SetupError if a table with row copies is not planned row-wise with the fused
    kernel, or if nodes have different numbers of ranks. It raises ExactnessError if row copies do
    not support the optimizer.
    """

    @property
    def module_type(self) -> type[TieredEmbeddingCollection]:
        return TieredEmbeddingCollection

    @property
    def sharded_module_type(self) -> type[ShardedTieredEmbeddingCollection]:
        return ShardedTieredEmbeddingCollection
