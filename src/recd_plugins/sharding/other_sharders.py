"""TorchRec's sharders for modules other than EmbeddingBagCollection and EmbeddingCollection.

Without them, ``DistributedModelParallel`` would shard only the EmbeddingBagCollection inside a
module such as ManagedCollisionEmbeddingBagCollection. Each rank would then have its own id map.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import KJTList
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
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import (
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
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
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.compat.managed_collision import (
    ExactManagedCollisionCollectionSharder,
    mend_managed_collision,
    why_all_rows_remapped,
)
from recd_plugins.compat.mean_pooling import mean_pooled
from recd_plugins.compat.portable_kernels import use_portable_lookups
from recd_plugins.compat.row_updates import (
    check_updates,
    tables_clipped_inside,
    why_plain_kernels,
)
from recd_plugins.interfaces.model_tables import embedding_modules
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.batch_form import BatchForm, fit_batches
from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
    left_uncompiled,
    refuse_two_dimensions,
)
from recd_plugins.sharding.wire import ADDED_ON_THE_WAY as _ROW_WISE
from recd_plugins.sharding.wire import Codecs, why_plain_codecs
from recd_plugins.sparse.deduplicated_kjt import unique_rows
from recd_plugins.sparse.jagged import with_fields

_OF_KJTS = (
    ShardedFeatureProcessedEmbeddingBagCollection,
    ShardedFusedEmbeddingBagCollection,
    ShardedFusedEmbeddingCollection,
    ShardedITEPEmbeddingBagCollection,
    ShardedITEPEmbeddingCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection,
)
# The bags inside are exact ones, which accept batches without rows.
_WITHOUT_ROWS = (
    BaseShardedManagedCollisionEmbeddingCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
_PRUNED = (ITEPEmbeddingBagCollection, ITEPEmbeddingCollection)
_PRIORITIZED = "PECEmbeddingCollection"  # since TorchRec 1.8


def other_sharders(
    base: Sequence[ModuleSharder[nn.Module]],
    bags: ExactEmbeddingBagCollectionSharder,
    sequences: ExactEmbeddingCollectionSharder,
    arguments: Callable[[Any], tuple[dict[str, Any], Codecs | None]],
) -> list[ModuleSharder[nn.Module]]:
    """Return TorchRec's sharders for module types other than the two embedding collections.

    Sharders in ``base`` replace TorchRec's. ``bags`` and ``sequences`` shard collections inside
    other modules, with the ``fused_params`` and codecs that ``arguments`` returns for a user's
    sharder.
    """
    codecs = bags.qcomm_codecs_registry
    around: list[Any] = [
        FeatureProcessedEmbeddingBagCollectionSharder(bags, codecs),
        ManagedCollisionEmbeddingBagCollectionSharder(bags, qcomm_codecs_registry=codecs),
        ManagedCollisionEmbeddingCollectionSharder(sequences, qcomm_codecs_registry=codecs),
        FusedEmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs),
    ]
    default = get_default_sharders()
    for sharder in default:
        if type(sharder).__name__ == "PECEmbeddingCollectionSharder":  # default since 1.9
            around.append(type(sharder)(sequences, qcomm_codecs_registry=codecs))
    own = [_with_exact(sharder, arguments) for sharder in base]
    by_type = {sharder.module_type: sharder for sharder in (*default, *around, *own)}
    return [
        _fitting(sharder)
        for module_type, sharder in by_type.items()
        if module_type not in (EmbeddingBagCollection, EmbeddingCollection)
    ]


def _with_exact(
    sharder: ModuleSharder[nn.Module],
    arguments: Callable[[Any], tuple[dict[str, Any], Codecs | None]],
) -> Any:
    """Return a copy of a user's sharder that uses this package's sharders for inner modules."""
    found: Any = copy.copy(sharder)
    for name in ("_ebc_sharder", "_e_sharder", "_embedding_collection_sharder"):
        inner: Any = getattr(found, name, None)
        if type(inner) in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder):
            params, found._qcomm_codecs_registry = arguments(inner)
            if type(inner) is EmbeddingBagCollectionSharder:
                exact: Any = ExactEmbeddingBagCollectionSharder
                setattr(found, name, exact(params, found._qcomm_codecs_registry))
            else:
                exact = ExactEmbeddingCollectionSharder
                dedup = inner._use_index_dedup
                setattr(found, name, exact(params, found._qcomm_codecs_registry, dedup))
    if type(found) is FusedEmbeddingBagCollectionSharder:  # its modules bring their optimizer
        _, found._qcomm_codecs_registry = arguments(found)
    return found


def _fitting(sharder: Any) -> ModuleSharder[nn.Module]:
    """Return a copy of a sharder whose modules convert batches to one form (``BatchForm``)."""
    fitting = copy.copy(sharder)
    if type(getattr(fitting, "_mc_sharder", None)) is ManagedCollisionCollectionSharder:
        fitting._mc_sharder = ExactManagedCollisionCollectionSharder()
    fitting.shard = partial(_shard, copy.copy(fitting))
    found: ModuleSharder[nn.Module] = fitting
    return found


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
    on_cpu = device is None or device.type == "cpu"
    _refuse_row_wise_means(name, module, params)
    if isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection):
        check_updates(module, params, None, device)
    sharded = sharder.shard(module, params, env, device, module_fqn)
    if isinstance(sharded, ShardedFusedEmbeddingBagCollection) and on_cpu:
        use_portable_lookups(sharded._lookups)
    if isinstance(sharded, ShardedFeatureProcessedEmbeddingBagCollection):
        keep_form(sharded)
        if any(each.sharding_type in _ROW_WISE for each in params.values()):
            keep_batches(sharded)
    if isinstance(sharded, BaseShardedManagedCollisionEmbeddingCollection):
        mend_managed_collision(sharded, device)
    if isinstance(sharded, _OF_KJTS):
        tables = [table for inside in embedding_modules(module) for table in inside.tables]
        clipped = (each.why_plain for each in tables_clipped_inside(sharded))
        why = why_plain(module) or next(filter(None, clipped), "")
        fused = isinstance(module, FusedEmbeddingBagCollection)
        if fused or isinstance(module, ManagedCollisionEmbeddingBagCollection):
            why = why or why_plain_codecs(getattr(sharder, "qcomm_codecs_registry", None))
        if fused and not (on_cpu or why):
            why = why_plain_kernels(module, params, None, "cuda")
        remaps = isinstance(sharded, BaseShardedManagedCollisionEmbeddingCollection)
        if remaps and not (on_cpu or why):
            # The input dist of the inner module is not called.
            forms = [getattr(inside, "form", None) for inside in sharded.modules()]
            why = next((form.plain_only for form in forms if isinstance(form, BatchForm)), "")
        features = (name for table in tables for name in table.features)
        fit_batches(
            sharded,
            BatchForm(name, why, features, env.process_group),
            remaps=remaps,
            needs_rows=not isinstance(sharded, _WITHOUT_ROWS),
            means=mean_pooled(module) if fused else None,
        )
    return left_uncompiled(sharded)


def _refuse_row_wise_means(
    name: str, module: nn.Module, params: EmbeddingModuleShardingPlan
) -> None:
    """Refuse row-wise tables with mean pooling if TorchRec (1.6 to 1.9) computes wrong means.

    A FusedEmbeddingBagCollection then divides the means of the other tables twice. In a
    FeatureProcessedEmbeddingBagCollection, the divisor ignores the feature processors' weights.
    """
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        means = mean_pooled(module._embedding_bag_collection)
    elif isinstance(module, FusedEmbeddingBagCollection):
        means = mean_pooled(module)
    else:
        return
    if tables := [table for table in means if params[table].sharding_type in _ROW_WISE]:
        raise SetupError(
            f"module {name!r}: tables {', '.join(map(repr, tables))} are sharded by rows and use "
            f"mean pooling, which TorchRec divides wrongly in a {type(module).__name__}. Shard "
            "these tables table-wise or column-wise, or use sum pooling."
        )


def why_plain(module: nn.Module) -> str:
    """Return the reason why a module needs plain batches; "" if it accepts deduplicated ones."""
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        processors = module._feature_processors
        collected = isinstance(processors, FeatureProcessorsCollection)
        found = {type(processors)} if collected else {type(each) for each in processors.values()}
        others = found - {PositionWeightedModule, PositionWeightedModuleCollection}
        names = ", ".join(sorted(each.__name__ for each in others))
        return f"because its feature processors {names} may read several rows" if names else ""
    if isinstance(module, BaseManagedCollisionEmbeddingCollection):
        return why_all_rows_remapped(module)
    if isinstance(module, FusedEmbeddingCollection) or type(module).__name__ == _PRIORITIZED:
        return "because an EmbeddingCollection returns one embedding per id"
    if isinstance(module, _PRUNED):
        return "because the module prunes rows by their number of lookups"
    if isinstance(module, FusedEmbeddingBagCollection):
        clips = module.optimizer_kwargs().get("gradient_clipping")
        return "because its gradient_clipping clips the gradient of each row" if clips else ""
    return ""


def keep_form(sharded: ShardedFeatureProcessedEmbeddingBagCollection) -> None:
    """Make feature processors return a deduplicated batch if their input is deduplicated."""
    process = sharded.apply_feature_processors_to_kjt_list

    def kept(dist_input: KJTList) -> KJTList:
        found = []
        for given, processed in zip(dist_input, process(dist_input), strict=True):
            if given.variable_stride_per_key() and not processed.variable_stride_per_key():
                strides = given.stride_per_key_per_rank()
                processed = with_fields(processed, stride=None, stride_per_key_per_rank=strides)
            found.append(processed)
        return KJTList(found)

    # An instance attribute, which forward and train pipelines find before the class's method.
    sharded.apply_feature_processors_to_kjt_list = kept


def keep_batches(sharded: ShardedFeatureProcessedEmbeddingBagCollection) -> None:
    """Make feature processors change a copy of the input's weights instead of the input batch."""
    preprocess, input_dist = sharded.preprocess_input, sharded.input_dist

    def preprocessed(args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        return preprocess(
            [_with_own_weights(each) for each in args],
            {name: _with_own_weights(each) for name, each in kwargs.items()},
        )

    def distributed(ctx: Any, features: Any) -> Any:
        # Train pipelines have already called the original method.
        return input_dist(ctx, features if sharded.is_pipelined else _with_own_weights(features))

    sharded.preprocess_input, sharded.input_dist = preprocessed, distributed


def _with_own_weights(features: Any) -> Any:
    if not isinstance(features, KeyedJaggedTensor):
        return features
    features = unique_rows(features)
    weights = features.weights_or_none()
    return with_fields(features, weights=None if weights is None else weights.clone())
