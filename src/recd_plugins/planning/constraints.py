"""What the planner may do with each table: the plugins' wishes, and what deduplication changes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from recd_plugins.data.prepared import PreparedModel
from recd_plugins.distributed.entry_constraints import (
    EntryConstraints,
    entry_constraints,
    merged_constraints,
    set_fields,
)
from recd_plugins.distributed.sharders import fused_params
from recd_plugins.errors import SetupError
from recd_plugins.interfaces import Sharding, Table
from recd_plugins.model_tables import EmbeddingModule
from recd_plugins.planning.table_optimizers import TableOptimizer
from recd_plugins.registry import Entry, TrainingSpec
from recd_plugins.values.data_profile import DataProfile, FeatureProfile
from recd_plugins.words import did_you_mean, shortened

_UNSET = ParameterConstraints()
_COLUMN_WISE = {
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    # Split by rows and columns; TorchRec's planner takes it only where a user asks for it.
    ShardingType.GRID_SHARD.value,
}


_BY_ROWS = {
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
}


def table_constraints(
    prepared: PreparedModel,
    tables: Sequence[Table],
    *,
    profile: DataProfile,
    device_type: str,
    optimizers: Mapping[str, TableOptimizer] | None = None,
    replicate: bool = False,
    exact: Collection[str] = (),
    wishes: Mapping[str, ParameterConstraints] | None = None,
    left: Sequence[EmbeddingModule] = (),
) -> dict[str, ParameterConstraints]:
    """Constraints by table name.

    A deduplicated feature sends, looks up and returns its unique rows of a batch, which is what
    ``ParameterConstraints.batch_sizes`` says, with the mean length of those rows as
    ``pooling_factors``: TorchRec's estimators reckon compute, communication, input dist and the
    storage of inputs and outputs from the two. (``pooling_factors`` alone would leave the
    communication of pooled embeddings as it is.) Of a table some of whose ids go elsewhere than to
    its shards (``TablePart.sharded_share``), the others count. A coalesced table sends, looks up
    and returns as many rows of one id as a batch has distinct ids, as those of its first feature.

    Args:
        prepared: the sharding and cache entries of its registry constrain the tables that they
            name, as do its parts; the batch size is that of a rank.
        tables: of the model, as plugins left it.
        profile: lengths and dedupe factors of the features.
        device_type: ``cpu`` or ``cuda``.
        optimizers: of the tables, where they are known; else ``training:`` says them all.
        replicate: whether tables may be data-parallel of the planner's own accord. Those train
            with the dense optimizer, so it has to be the rule of ``training:``.
        exact: names of tables that are sharded by this library's own sharders: on CPU their
            data-parallel kernels take sequences, and deduplicated batches. Entries say whether
            they may (``Sharding.may_replicate``).
        wishes: of the trainer, by table name; they go before what is known of the data.
        left: modules that TorchRec's own sharders take.

    Raises:
        PluginError: a plugin constrains a table that is none of its own.
        SetupError: two plugins, or one and ``wishes``, set the same thing for one table in
            different ways; ``wishes`` name no table of the model, or what TorchRec does not take;
            a data-parallel table would lose the optimizer that its parameter brings.
    """
    registry, wishes = prepared.registry, wishes or {}
    merged: dict[str, ParameterConstraints] = {}
    set_by: dict[tuple[str, str], EntryConstraints] = {}
    others = [table for module in left for table in module.tables]
    _check_wishes(wishes, [*tables, *others])
    parts = prepared.checked_parts
    of_trainer = EntryConstraints("", "planner(constraints=...)", wishes)
    for entry in (*entry_constraints(prepared, tables), of_trainer):
        for name, constraints in entry.of_tables.items():
            for field in set_fields(constraints):
                first = set_by.setdefault((name, field), entry)
                value, other = getattr(constraints, field), getattr(merged.get(name), field, None)
                if first is not entry and other != value:
                    raise SetupError(
                        f"{entry.where}table {name}: {entry.plugin} and {first.plugin} set "
                        f"different {field} ({value} and {other}); leave the table to one of them"
                    )
            merged[name] = merged_constraints(merged.get(name, _UNSET), constraints)
    _keep_optimizers(merged, optimizers or {})
    replicated = _replicated(registry.sharding, tables)
    tables = [*tables, *others]
    for table in tables:
        features = [profile.of(feature) for feature in table.features]
        if table.name in replicated:
            # Data-parallel kernels are fed every row.
            features = [feature.plain() for feature in features]
        own_share = math.prod(part.sharded_share(table.name) for part in parts)
        merged[table.name] = _with_batch_sizes(
            merged.get(table.name, _UNSET),
            table,
            registry.training.batch_size,
            features,
            own_share,
            profile,
        )
    asked = {
        table.name
        for entry in registry.sharding
        if entry.plugin.may_replicate
        for table in tables
        if entry.matches(table.name) and table.name in exact
    }
    not_replicated = _not_replicated(
        replicated,
        tables,
        profile,
        prepared.coalesced,
        device_type=device_type,
        exact=asked if device_type == "cpu" else (),
    )
    not_replicated |= {table.name for table in others}
    for table in tables:
        if merged[table.name].sharding_types is None:
            optimizer = (optimizers or {}).get(table.name) or _of_training(registry.training)
            merged[table.name] = replace(
                merged[table.name],
                sharding_types=_kinds_of_its_own_accord(
                    optimizer.elementwise,
                    replicated=replicate
                    and table.name not in not_replicated
                    and optimizer == _of_training(registry.training),
                ),
            )
    for module in left:
        for table in module.tables:
            wish = wishes.get(table.name, _UNSET)
            merged[table.name] = _of_left(module, merged[table.name], wish, device_type)
    return merged


def _of_training(training: TrainingSpec) -> TableOptimizer:
    params = fused_params(training)
    return TableOptimizer("", training.optimizer == "sgd", params)


def _check_wishes(wishes: Mapping[str, ParameterConstraints], tables: Sequence[Table]) -> None:
    """Refuse constraints that TorchRec's planner would pass over, or fail by."""
    known = [table.name for table in tables]
    for name in wishes:
        if name not in known:
            raise SetupError(
                f"planner(constraints=...) names {name}, which is no table of the model"
                + (did_you_mean(name, known) or f"; the tables: {shortened(known)}")
            )


def _keep_optimizers(
    merged: dict[str, ParameterConstraints], optimizers: Mapping[str, TableOptimizer]
) -> None:
    """Take data-parallel from tables that bring an optimizer, which would be dropped; or refuse."""
    for name, constraints in merged.items():
        kinds, optimizer = constraints.sharding_types, optimizers.get(name)
        if not kinds or optimizer is None or not optimizer.in_backward:
            continue
        others = [kind for kind in kinds if kind != ShardingType.DATA_PARALLEL.value]
        if not others:
            raise SetupError(
                f"table {name} is to be data-parallel, and its parameter brings "
                f"{optimizer.in_backward} (apply_optimizer_in_backward), which "
                "DistributedModelParallel drops for data-parallel tables: apply it to the other "
                "tables only and give this one to the dense optimizer, or shard it another way"
            )
        merged[name] = replace(constraints, sharding_types=others)


def _of_left(
    module: EmbeddingModule,
    constraints: ParameterConstraints,
    wish: ParameterConstraints,
    device_type: str,
) -> ParameterConstraints:
    """Of a table that one of TorchRec's own sharders takes, which offer kinds that do not run."""
    is_processed = isinstance(module.shardable, FeatureProcessedEmbeddingBagCollection)
    if is_processed and wish.sharding_types is None:
        kinds = [kind for kind in constraints.sharding_types or [] if kind not in _BY_ROWS]
        constraints = replace(constraints, sharding_types=kinds)
    if device_type == "cpu" and wish.compute_kernels is None:
        # Managed collision names kernels of CUDA alone on CPU too (torchrec 1.6 to 1.9).
        kernels = [EmbeddingComputeKernel.FUSED.value]
        constraints = replace(constraints, compute_kernels=kernels)
    return constraints


def _kinds_of_its_own_accord(elementwise: bool, *, replicated: bool) -> list[str]:
    """Sharding types that the planner may choose where no plugin does.

    Not those that change what is trained: each column shard has a row-wise Adagrad of its own, and
    a data-parallel table no optimizer in the backward pass.
    """
    excluded = {ShardingType.GRID_SHARD.value}
    if not elementwise:
        excluded |= _COLUMN_WISE
    if not replicated:
        excluded.add(ShardingType.DATA_PARALLEL.value)
    return [kind.value for kind in ShardingType if kind.value not in excluded]


def _with_batch_sizes(
    constraints: ParameterConstraints,
    table: Table,
    batch_size: int,
    features: Sequence[FeatureProfile],
    own_share: float,
    profile: DataProfile,
) -> ParameterConstraints:
    """With rows and lengths by feature, where no plugin has set them."""
    rows = [feature.rows(batch_size) for feature in features]
    ids = [feature.ids(batch_size, pooled=table.pooled) for feature in features]
    if table.name in profile.distinct:
        distinct = profile.ids(table, batch_size)
        rows = ids = [distinct] + [0.0] * (len(features) - 1)
    if constraints.batch_sizes is None:
        constraints = replace(constraints, batch_sizes=[max(1, round(each)) for each in rows])
    if constraints.pooling_factors == _UNSET.pooling_factors:
        lengths = [
            own_share * each / size
            for each, size in zip(ids, constraints.batch_sizes or (), strict=True)
        ]
        constraints = replace(constraints, pooling_factors=lengths)
    return constraints


def _replicated(entries: Sequence[Entry[Sharding]], tables: Sequence[Table]) -> set[str]:
    """Tables that a plugin replicates."""
    return {
        table.name
        for entry in entries
        if entry.plugin.replicates
        for table in tables
        if entry.matches(table.name)
    }


def _not_replicated(
    replicated: set[str],
    tables: Sequence[Table],
    profile: DataProfile,
    coalesced: Collection[str],
    *,
    device_type: str,
    exact: Collection[str],
) -> set[str]:
    """Tables that the planner must not make data-parallel of its own accord.

    Coalesced tables, as their ids are to be sent, and bags beside them, whose batches vary. Of the
    others all but ``exact``: bags fed variable batches, which TorchRec's data-parallel kernels do
    not take (those that no plugin replicates share one input, so one deduplicated feature is
    enough), and sequences on CPU, where these kernels are wrong.
    """
    others = [table for table in tables if table.name not in replicated]
    bags = [table for table in others if table.pooled]
    any_coalesced = any(table.name in coalesced for table in bags)
    variable = any(profile.of(feature).deduplicated for t in bags for feature in t.features)
    return {
        table.name
        for table in others
        if table.name in coalesced
        or (table.pooled and any_coalesced)
        or (table.name not in exact and (variable if table.pooled else device_type == "cpu"))
    }
