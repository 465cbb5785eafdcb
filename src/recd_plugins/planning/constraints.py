"""What the planner may do with each table: wishes of plugins, data and optimizers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from recd_plugins.compat.row_updates import ELEMENTWISE, kind_of_update
from recd_plugins.config import TrainingSpec
from recd_plugins.data.prepared import PreparedModel
from recd_plugins.interfaces import Table
from recd_plugins.interfaces.data_profile import DataProfile
from recd_plugins.interfaces.model_tables import EmbeddingModule, sharded_modules
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.text import did_you_mean, shortened
from recd_plugins.sharding.entry_constraints import (
    EntryConstraints,
    entry_constraints,
    merged_constraints,
    set_fields,
)
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.sharding.wire import int8_of

_UNSET = ParameterConstraints()
_CACHED = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
# Split by rows and columns; TorchRec's planner takes it only if a user asks for it.
_GRID = ShardingType.GRID_SHARD.value
_COLUMN_WISE = {ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value, _GRID}
_BY_ROWS = {ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, _GRID}


@dataclass(frozen=True)
class TableOptimizer:
    """The optimizer that a table has in the backward pass.

    Attributes:
        in_backward: name of the class that the table's parameter brings, by
            ``apply_optimizer_in_backward``; empty if the sharder says the optimizer.
        elementwise: whether parts of a row are trained as a whole row is.
        fused_params: of the sharder.
    """

    in_backward: str
    elementwise: bool
    fused_params: Mapping[str, Any]


def table_optimizers(
    model: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]]
) -> dict[str, TableOptimizer]:
    """Return the optimizers of the tables that ``sharders`` would shard, by table name."""
    found: dict[str, TableOptimizer] = {}
    for module, sharder in sharded_modules(model, sharders):
        params: Mapping[str, Any] = getattr(sharder, "fused_params", None) or {}
        for table, parameter in sharder.shardable_parameters(module).items():
            if isinstance(module, FusedEmbeddingBagCollection):
                classes, kwargs = [module.optimizer_type()], dict[str, Any]()
            else:
                # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
                classes = getattr(parameter, "_optimizer_classes", [])
                kwargs = dict(*getattr(parameter, "_optimizer_kwargs", [{}])[:1])
            kind = params.get("optimizer", EmbOptimType.EXACT_SGD)
            if classes:
                kind = _kind_of(classes[0], kwargs)
            name = classes[0].__name__ if classes else ""
            own = TableOptimizer(name, kind in ELEMENTWISE, params)
            first = found.setdefault(table, own)
            if first != own:  # tables of one name share constraints: no more than both allow
                elementwise = first.elementwise and own.elementwise
                found[table] = TableOptimizer(first.in_backward or name, elementwise, {})
    return found


def _kind_of(optimizer_class: Any, arguments: Mapping[str, Any]) -> EmbOptimType | None:
    """FBGEMM's name of it; None if it has none, which its sharder refuses."""
    try:
        return kind_of_update(optimizer_class, arguments)
    except ValueError:
        return None


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
    """Return constraints by table name.

    A deduplicated feature sends, looks up and returns its unique rows of a batch: that is
    ``ParameterConstraints.batch_sizes``, with the mean length of those rows as
    ``pooling_factors``. A coalesced table does so with one row for each distinct id, as those of
    its first feature. Ids that go elsewhere than to a table's shards do not count.

    Args:
        prepared: sharding and cache entries, and their parts.
        tables: of the model, as plugins left it.
        profile: lengths and dedupe factors of the features.
        device_type: ``cpu`` or ``cuda``.
        optimizers: of the tables; those of ``training:`` without it.
        replicate: whether the planner may replicate tables of its own accord. Those train with the
            dense optimizer, so it has to be the rule of ``training:``.
        exact: tables of this library's own sharders, whose data-parallel kernels on CPU take
            sequences, and deduplicated batches.
        wishes: of the trainer, by table name; they go before what is known of the data.
        left: modules that TorchRec's own sharders take.

    Raises:
        PluginError: a plugin constrains a table that is none of its own.
        SetupError: two plugins, or one and ``wishes``, set the same thing for one table in
            different ways; ``wishes`` name no table of the model, or what TorchRec does not take;
            a data-parallel table would lose the optimizer that its parameter brings.
    """
    registry, wishes, optimizers = prepared.registry, wishes or {}, optimizers or {}
    others = [table for module in left for table in module.tables]
    _check_wishes(wishes, [*tables, *others])
    of_trainer = EntryConstraints("", "planner(constraints=...)", wishes)
    merged = _merged((*entry_constraints(prepared, tables), of_trainer))
    _keep_optimizers(merged, optimizers)
    replicated = {
        table.name
        for table in tables
        if any(entry.plugin.replicates and entry.matches(table.name) for entry in registry.sharding)
    }
    own_training = TableOptimizer(
        "", registry.training.optimizer == "sgd", fused_params(registry.training)
    )
    sharded = _not_replicated(prepared, [*tables, *others], profile, replicated, device_type, exact)
    sharded |= {table.name for table in others}
    for table in (*tables, *others):
        share = math.prod(part.sharded_share(table.name) for part in prepared.checked_parts)
        found = _with_batch_sizes(
            merged.get(table.name, _UNSET),
            table,
            registry.training,
            # Data-parallel kernels are fed every row.
            profile.plain() if table.name in replicated else profile,
            share,
            profile,
        )
        if found.sharding_types is None:
            optimizer = optimizers.get(table.name) or own_training
            may = replicate and table.name not in sharded and optimizer == own_training
            found = replace(found, sharding_types=_kinds(optimizer.elementwise, replicated=may))
        merged[table.name] = found
    for module in left:
        for table in module.tables:
            wish = wishes.get(table.name, _UNSET)
            merged[table.name] = _of_left(module, merged[table.name], wish, device_type)
    return merged


def feasible(
    module: nn.Module,
    sharders: Iterable[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints],
    device_type: str,
) -> dict[str, ParameterConstraints]:
    """Return the constraints without sharding types that have none of the kernels asked for.

    TorchRec tries every type, and warns of each that has no kernel. And it tries every kernel of a
    sharder for all of its tables: on CPU the cached one is for tables that ask for it.

    Raises:
        SetupError: a table is left without a sharding type or without a kernel; says which.
    """
    narrowed = dict(constraints)
    for child, sharder in sharded_modules(module, sharders):
        offered = {
            str(kind): sharder.compute_kernels(kind, device_type)
            for kind in sharder.sharding_types(device_type)
        }
        who = type(sharder).__name__
        if int8_of(getattr(sharder, "qcomm_codecs_registry", None)) is not None:
            who += " with training.wire int8"
        for name in sharder.shardable_parameters(child):
            wanted = constraints.get(name, _UNSET)
            kinds = [kind for kind in offered if kind in (wanted.sharding_types or offered)]
            if not kinds:
                raise SetupError(
                    f"table {name} cannot be sharded {', '.join(wanted.sharding_types or [])} on "
                    f"{device_type}: {who} offers {', '.join(offered)}; name another sharding for "
                    "it, or leave it to the planner"
                )
            kernels = dict.fromkeys(kernel for each in offered.values() for kernel in each)
            if wanted.compute_kernels:
                asked = set(wanted.compute_kernels)
                with_kernel = [kind for kind in kinds if asked & set(offered[kind])]
                if not with_kernel:
                    known = dict.fromkeys(kernel for kind in kinds for kernel in offered[kind])
                    raise SetupError(
                        f"table {name} cannot have the compute kernel "
                        f"{', '.join(wanted.compute_kernels)} on {device_type}: {who} offers "
                        f"{', '.join(known)} for {', '.join(kinds)}; name another cache or "
                        "sharding for it"
                    )
                narrowed[name] = replace(wanted, sharding_types=with_kernel)
            elif wanted.compute_kernels is None and device_type == "cpu" and _CACHED in kernels:
                del kernels[_CACHED]
                narrowed[name] = replace(wanted, compute_kernels=list(kernels))
    return narrowed


def _merged(entries: Iterable[EntryConstraints]) -> dict[str, ParameterConstraints]:
    """The constraints of all entries by table, which must not contradict one another."""
    merged: dict[str, ParameterConstraints] = {}
    set_by: dict[tuple[str, str], EntryConstraints] = {}
    for entry in entries:
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
    return merged


def _check_wishes(wishes: Mapping[str, ParameterConstraints], tables: Sequence[Table]) -> None:
    """Refuse constraints of tables that are not there, which TorchRec's planner would pass over."""
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
        others = [kind for kind in kinds if kind != _DATA_PARALLEL]
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
    """For a table of one of TorchRec's own sharders, which offer kinds that do not run."""
    is_processed = isinstance(module.shardable, FeatureProcessedEmbeddingBagCollection)
    if is_processed and wish.sharding_types is None:
        kinds = [kind for kind in constraints.sharding_types or [] if kind not in _BY_ROWS]
        constraints = replace(constraints, sharding_types=kinds)
    if device_type == "cpu" and wish.compute_kernels is None:
        # Managed collision names kernels of CUDA alone on CPU too (torchrec 1.6 to 1.9).
        kernels = [EmbeddingComputeKernel.FUSED.value]
        constraints = replace(constraints, compute_kernels=kernels)
    return constraints


def _kinds(elementwise: bool, *, replicated: bool) -> list[str]:
    """Sharding types that the planner may choose of its own accord.

    Not those that change what is trained: each column shard has a row-wise Adagrad of its own, and
    a data-parallel table no optimizer in the backward pass.
    """
    excluded = {_GRID} | (set() if elementwise else _COLUMN_WISE)
    excluded |= set() if replicated else {_DATA_PARALLEL}
    return [kind.value for kind in ShardingType if kind.value not in excluded]


def _with_batch_sizes(
    constraints: ParameterConstraints,
    table: Table,
    training: TrainingSpec,
    fed: DataProfile,
    own_share: float,
    profile: DataProfile,
) -> ParameterConstraints:
    """With rows and lengths by feature, if no plugin has set them."""
    size, features = training.batch_size, [fed.of(name) for name in table.features]
    rows = [feature.rows(size) for feature in features]
    ids = [feature.ids(size, pooled=table.pooled) for feature in features]
    if table.name in profile.distinct:
        rows = ids = [profile.ids(table, size)] + [0.0] * (len(features) - 1)
    if constraints.batch_sizes is None:
        constraints = replace(constraints, batch_sizes=[max(1, round(each)) for each in rows])
    if constraints.pooling_factors == _UNSET.pooling_factors:
        pairs = zip(ids, constraints.batch_sizes or (), strict=True)
        lengths = [own_share * each / size for each, size in pairs]
        constraints = replace(constraints, pooling_factors=lengths)
    return constraints


def _not_replicated(
    prepared: PreparedModel,
    tables: Sequence[Table],
    profile: DataProfile,
    replicated: Collection[str],
    device_type: str,
    exact: Collection[str],
) -> set[str]:
    """Return tables that the planner must not make data-parallel of its own accord.

    Coalesced tables, as their ids are to be sent, and bags beside them, whose batches vary. Of the
    others bags fed variable batches, which TorchRec's data-parallel kernels do not take, and
    sequences on CPU, where these kernels are wrong; unless an entry whose tables are ``exact``
    says that they may be replicated.
    """
    may = {
        table.name
        for entry in prepared.registry.sharding
        if entry.plugin.may_replicate and device_type == "cpu"
        for table in tables
        if entry.matches(table.name) and table.name in exact
    }
    others = [table for table in tables if table.name not in replicated]
    bags = [table for table in others if table.pooled]
    any_coalesced = any(table.name in prepared.coalesced for table in bags)
    # Bags share one input, so one deduplicated feature is enough.
    variable = any(profile.of(feature).deduplicated for t in bags for feature in t.features)
    return {
        table.name
        for table in others
        if table.name in prepared.coalesced
        or (table.pooled and any_coalesced)
        or (table.name not in may and (variable if table.pooled else device_type == "cpu"))
    }
