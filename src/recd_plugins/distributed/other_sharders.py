"""TorchRec's sharders of the module types that this package does not shard."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.fused_embedding import ShardedFusedEmbeddingCollection
from torchrec.distributed.fused_embeddingbag import (
    FusedEmbeddingBagCollectionSharder,
    ShardedFusedEmbeddingBagCollection,
)
from torchrec.distributed.itep_embeddingbag import (
    ShardedITEPEmbeddingBagCollection,
    ShardedITEPEmbeddingCollection,
)
from torchrec.distributed.mc_embedding import (
    ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ShardedManagedCollisionEmbeddingBagCollection,
)
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardedModule,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from torchrec.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
)

from recd_plugins.distributed.batch_form import BatchForm, fit_batches
from recd_plugins.distributed.clipped_gradients import clips, why_clipped
from recd_plugins.distributed.compiled import left_uncompiled
from recd_plugins.distributed.feature_processors import (
    keep_batches,
    keep_form,
    why_all_rows_processed,
)
from recd_plugins.distributed.id_weights import IdWeights
from recd_plugins.distributed.int8 import why_plain_codecs
from recd_plugins.distributed.lent import Lent
from recd_plugins.distributed.managed_collision import (
    ExactManagedCollisionCollectionSharder,
    mend_managed_collision,
    why_all_rows_remapped,
)
from recd_plugins.distributed.mean_pooling import mean_pooled
from recd_plugins.distributed.plain_kernels import plain_updates, why_plain_kernels
from recd_plugins.distributed.portable_kernels import use_portable_lookups
from recd_plugins.distributed.row_updates import check_update_of_fused
from recd_plugins.distributed.sharding_agreement import refuse_two_dimensions
from recd_plugins.distributed.torchrec_internals import require_attributes
from recd_plugins.errors import SetupError
from recd_plugins.model_tables import embedding_modules

_OF_KJTS = (
    ShardedFeatureProcessedEmbeddingBagCollection,
    ShardedFusedEmbeddingBagCollection,
    ShardedFusedEmbeddingCollection,
    ShardedITEPEmbeddingBagCollection,
    ShardedITEPEmbeddingCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection,
)
# Their bags are exact ones, which take batches without rows.
_WITHOUT_ROWS = (
    BaseShardedManagedCollisionEmbeddingCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
_PRUNED = (ITEPEmbeddingBagCollection, ITEPEmbeddingCollection)
_PRIORITIZED = "PECEmbeddingCollection"  # since TorchRec 1.8
_ROW_WISE = {
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
}


def other_sharders(
    base: Sequence[ModuleSharder[nn.Module]],
    bags: EmbeddingBagCollectionSharder,
    sequences: EmbeddingCollectionSharder,
    with_said: Callable[[Lent], Lent],
) -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders but for its EmbeddingBagCollection and EmbeddingCollection.

    Without them ``DistributedModelParallel`` would shard the EmbeddingBagCollection *inside* of,
    say, a ManagedCollisionEmbeddingBagCollection, and leave the collision map of each rank to
    itself.

    Args:
        base: sharders that a trainer has; they go before TorchRec's of the same module type.
        bags: shards the EmbeddingBagCollection inside a module.
        sequences: shards the EmbeddingCollection inside a module.
        with_said: adds to the arguments of one in ``base`` what was said apart from it.
    """
    codecs = bags.qcomm_codecs_registry
    around: list[ModuleSharder[nn.Module]] = [
        FeatureProcessedEmbeddingBagCollectionSharder(bags, codecs),
        ManagedCollisionEmbeddingBagCollectionSharder(bags, qcomm_codecs_registry=codecs),
        ManagedCollisionEmbeddingCollectionSharder(sequences, qcomm_codecs_registry=codecs),
        FusedEmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs),
    ]
    default = get_default_sharders()
    for sharder in default:
        if type(sharder).__name__ == "PECEmbeddingCollectionSharder":  # default since 1.9
            around.append(type(sharder)(sequences, qcomm_codecs_registry=codecs))
    own = [_with_exact(sharder, bags, sequences, with_said) for sharder in base]
    by_type: dict[type[nn.Module], Any] = {
        sharder.module_type: sharder for sharder in (*default, *around, *own)
    }
    return [
        _fitting(sharder)
        for module_type, sharder in by_type.items()
        if module_type not in (EmbeddingBagCollection, EmbeddingCollection)
    ]


def _with_exact(
    sharder: ModuleSharder[nn.Module],
    bags: EmbeddingBagCollectionSharder,
    sequences: EmbeddingCollectionSharder,
    with_said: Callable[[Lent], Lent],
) -> Any:
    """A copy of a trainer's sharder, with exact ones inside, and with what was said."""
    found: Any = copy.copy(sharder)
    # Private, torchrec 1.6 to 1.9: the sharders of what is inside, and the codecs.
    for name in ("_ebc_sharder", "_e_sharder", "_embedding_collection_sharder"):
        inner = getattr(found, name, None)
        if type(inner) not in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder):
            continue
        lent = with_said(Lent.of(inner))
        params, codecs = dict(lent.fused_params or {}), lent.qcomm_codecs_registry
        exact: Any = (
            type(bags)(params, codecs)
            if type(inner) is EmbeddingBagCollectionSharder
            else type(sequences)(params, codecs, lent.use_index_dedup)
        )
        setattr(found, name, exact)
        found._qcomm_codecs_registry = codecs
    if type(found) is FusedEmbeddingBagCollectionSharder:  # its modules bring their optimizer
        codecs = with_said(Lent(None, found.qcomm_codecs_registry)).qcomm_codecs_registry
        found._qcomm_codecs_registry = codecs
    return found


def _fitting(sharder: ModuleSharder[nn.Module]) -> ModuleSharder[nn.Module]:
    """A copy whose modules get batches of one form."""
    fitting: Any = copy.copy(sharder)
    if type(getattr(fitting, "_mc_sharder", None)) is ManagedCollisionCollectionSharder:
        fitting._mc_sharder = ExactManagedCollisionCollectionSharder()
    fitting.shard = partial(_shard, copy.copy(fitting))
    return fitting


def _shard(
    sharder: ModuleSharder[nn.Module],
    module: nn.Module,
    params: EmbeddingModuleShardingPlan,
    env: ShardingEnv,
    device: torch.device | None = None,
    module_fqn: str | None = None,
) -> ShardedModule[Any, Any, Any, Any]:
    name = module_fqn or type(module).__name__
    refuse_two_dimensions(name, env)
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        _refuse_row_wise_means(name, module, params)
    if isinstance(module, _PRUNED) and not hasattr(torch.ops.fbgemm, "init_address_lookup"):
        raise SetupError(
            f"{name} is a {type(module).__name__}, and the installed FBGEMM lacks the operators of "
            "in-training pruning, which its builds for CUDA alone have: train it there, or give "
            "the tables as many rows as there are ids"
        )
    on_cpu = device is None or device.type == "cpu"
    if isinstance(module, FusedEmbeddingBagCollection):
        _refuse_rows_of_fused_bags(name, module, params, on_cpu=on_cpu)
    if isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection):
        check_update_of_fused(name, module, params, device)
    sharded = sharder.shard(module, params, env, device, module_fqn)
    if isinstance(sharded, ShardedFusedEmbeddingBagCollection) and on_cpu:
        require_attributes(sharded, "_lookups")  # private, torchrec 1.6 to 1.9
        use_portable_lookups(sharded._lookups)
    if isinstance(sharded, ShardedFeatureProcessedEmbeddingBagCollection):
        keep_form(sharded)
        if any(each.sharding_type in _ROW_WISE for each in params.values()):
            keep_batches(sharded)
    if isinstance(sharded, BaseShardedManagedCollisionEmbeddingCollection):
        mend_managed_collision(sharded, device)
    if isinstance(sharded, _OF_KJTS):
        tables = [table for inside in embedding_modules(module) for table in inside.tables]
        features = (feature for table in tables for feature in table.features)
        why = why_plain(module) or why_clipped(sharded)
        if isinstance(module, FusedEmbeddingBagCollection | ManagedCollisionEmbeddingBagCollection):
            why = why or why_plain_codecs(getattr(sharder, "qcomm_codecs_registry", None))
        if not (on_cpu or why):
            why = _why_plain_kernels(module, sharded, params)
        fit_batches(
            sharded,
            BatchForm(name, why, features, env.process_group),
            remaps=isinstance(sharded, BaseShardedManagedCollisionEmbeddingCollection),
            needs_rows=not isinstance(sharded, _WITHOUT_ROWS),
            weights=IdWeights(name, weighted=module.is_weighted(), means=mean_pooled(module))
            if isinstance(module, FusedEmbeddingBagCollection)
            else None,
        )
    return left_uncompiled(sharded)


def _refuse_row_wise_means(
    name: str,
    module: FeatureProcessedEmbeddingBagCollection,
    params: EmbeddingModuleShardingPlan,
) -> None:
    """Refuse tables whose divisor is made before there are weights to make it from."""
    bags = module._embedding_bag_collection  # private, torchrec 1.6 to 1.9, as in its sharder
    tables = [
        config.name
        for config in bags.embedding_bag_configs()
        if config.pooling == PoolingType.MEAN and params[config.name].sharding_type in _ROW_WISE
    ]
    if tables:
        raise SetupError(
            f"{name}: tables {', '.join(tables)} of a FeatureProcessedEmbeddingBagCollection are "
            "split by rows and pooled by weighted means, whose weights come too late for TorchRec: "
            "leave their sharding to the planner, or pool by sums"
        )


def _refuse_rows_of_fused_bags(
    name: str,
    module: FusedEmbeddingBagCollection,
    params: EmbeddingModuleShardingPlan,
    *,
    on_cpu: bool,
) -> None:
    """Refuse shardings by rows that TorchRec does not offer, or in which it divides too much."""
    by_rows = {table for table, each in params.items() if each.sharding_type in _ROW_WISE}
    means = [
        config.name
        for config in module.embedding_bag_configs()
        if config.name in by_rows and config.pooling == PoolingType.MEAN
    ]
    for tables, why in (
        (sorted(by_rows) if on_cpu else [], "for CUDA alone"),
        (means, "wrong where bags are means: it divides those of other tables, too"),
    ):
        if tables:
            raise SetupError(
                f"{name}: tables {', '.join(tables)} of a FusedEmbeddingBagCollection are split by "
                f"rows, which is {why}. Shard them by tables or columns, or make the module an "
                "EmbeddingBagCollection"
            )


def _why_plain_kernels(
    module: nn.Module, sharded: nn.Module, params: EmbeddingModuleShardingPlan
) -> str:
    """Why kernels on CUDA take plain batches alone; empty where they take others."""
    if isinstance(module, FusedEmbeddingBagCollection):
        updates = plain_updates(module, None, "cuda")
        return why_plain_kernels(params, updates, on_cpu=False)
    if not isinstance(sharded, BaseShardedManagedCollisionEmbeddingCollection):
        return ""
    # Of the module inside, whose own input dist is not called.
    forms = [getattr(inside, "form", None) for inside in sharded.modules()]
    return next((form.plain_only for form in forms if isinstance(form, BatchForm)), "")


def why_plain(module: nn.Module) -> str:
    """Why a module's batches have to be plain; empty where they need not be."""
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        return why_all_rows_processed(module)
    if isinstance(module, BaseManagedCollisionEmbeddingCollection):
        return why_all_rows_remapped(module)
    if isinstance(module, FusedEmbeddingCollection) or type(module).__name__ == _PRIORITIZED:
        return "as an EmbeddingCollection has rows for ids"
    if isinstance(module, _PRUNED):
        return "as it prunes rows by how often they are looked up"
    if isinstance(module, FusedEmbeddingBagCollection) and clips(module.optimizer_kwargs()):
        return "as its gradient_clipping clips the gradient of each row"
    return ""
