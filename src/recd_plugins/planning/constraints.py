"""Builds ParameterConstraints of each table for TorchRec's planner."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.sharders import fused_params

_UNSET = ParameterConstraints()
_CACHED = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
# TorchRec's planner uses it only on request.
_GRID = ShardingType.GRID_SHARD.value
_COLUMN_WISE = {ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value, _GRID}
_BY_ROWS = {ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, _GRID}


@dataclass(frozen=True)
class TableOptimizer:
    """The optimizer of a table in the backward pass.

    Attributes:
        in_backward: class name set by ``apply_optimizer_in_backward``, or "".
        elementwise: whether column-wise shards train as the full table, by a state per element.
        fused_params: FBGEMM's fused_params from the sharder.
    """

    in_backward: str
    elementwise: bool
    fused_params: Mapping[str, Any]


def table_optimizers(
    model: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]]
) -> dict[str, TableOptimizer]:
    """Return a dict from table name to optimizer, for the tables that ``sharders`` would shard."""
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
            if first != own:  # tables of the same name share constraints
                elementwise = first.elementwise and own.elementwise
                found[table] = TableOptimizer(first.in_backward or name, elementwise, {})
    return found


def _kind_of(optimizer_class: Any, arguments: Mapping[str, Any]) -> EmbOptimType | None:
    """Return FBGEMM's enum value for an optimizer class, or None."""
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
    """Return a dict from table name to planner constraints.

    The constraints contain batch sizes and pooling factors from ``profile``. For deduplicated
    features, ``batch_sizes`` count unique rows, and ``pooling_factors`` are the mean lengths of
    unique rows. For a coalesced table, ``batch_sizes`` of the first feature is the number of
    distinct ids. Ids that plugins look up outside of TorchRec's kernels are not counted.

    Args:
        prepared: model with sharding and cache entries.
        tables: tables of the prepared model.
        profile: profile of the features.
        device_type: ``cpu`` or ``cuda``.
        optimizers: optimizer of each table; default: the optimizer of ``training:``.
        replicate: whether the planner may make tables data-parallel.
        exact: tables of this package's own sharders. Their data-parallel kernels on CPU support
            sequences and deduplicated batches.
        wishes: the user's constraints of each table; they override values of ``profile``.
        left: modules that TorchRec's own sharders shard.

    Raises:
        SetupError: two plugins, or a plugin and ``wishes``, set a field of a table to different
            values; or a data-parallel table would lose its own optimizer.
    """
    registry, wishes, optimizers = prepared.registry, wishes or {}, optimizers or {}
    others = [table for module in left for table in module.tables]
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
        share = math.prod(part.sharded_share(table.name) for part in prepared.plugin_strategies)
        # Data-parallel kernels receive all rows.
        fed = profile.plain() if table.name in replicated else profile
        found = merged.get(table.name, _UNSET)
        found = _with_batch_sizes(found, table, registry.training, fed, share, profile)
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
    """Return the constraints without sharding types that have no kernel on ``device_type``.

    On CPU, only tables that request the cached kernel may use it.

    Raises:
        SetupError: a table has no sharding type with a kernel.
    """
    narrowed = dict(constraints)
    for child, sharder in sharded_modules(module, sharders):
        offered = {
            str(kind): sharder.compute_kernels(kind, device_type)
            for kind in sharder.sharding_types(device_type)
        }
        every = list(dict.fromkeys(kernel for each in offered.values() for kernel in each))
        for name in sharder.shardable_parameters(child):
            wanted = constraints.get(name, _UNSET)
            asked = set(wanted.compute_kernels or every)
            kinds = [
                kind
                for kind in offered
                if kind in (wanted.sharding_types or offered) and asked & set(offered[kind])
            ]
            if not kinds:
                asked_for = " or".join(f" {kind!r}" for kind in wanted.sharding_types or [])
                if wanted.compute_kernels:
                    asked_for += f" with kernels {', '.join(map(repr, wanted.compute_kernels))}"
                raise SetupError(
                    f"table {name!r} cannot be sharded{asked_for} on {device_type}. "
                    f"{type(sharder).__name__} supports the sharding types "
                    f"{', '.join(map(repr, offered))} and the kernels "
                    f"{', '.join(map(repr, every))}. Use one of these in the table's entry."
                )
            if wanted.compute_kernels:
                narrowed[name] = replace(wanted, sharding_types=kinds)
            elif wanted.compute_kernels is None and device_type == "cpu" and _CACHED in every:
                kernels = [kernel for kernel in every if kernel != _CACHED]
                narrowed[name] = replace(wanted, compute_kernels=kernels)
    return narrowed


def _merged(entries: Iterable[EntryConstraints]) -> dict[str, ParameterConstraints]:
    """Merge the planner constraints of all entries; raise SetupError if two entries contradict."""
    merged: dict[str, ParameterConstraints] = {}
    set_by: dict[tuple[str, str], EntryConstraints] = {}
    for entry in entries:
        for name, constraints in entry.of_tables.items():
            for field in set_fields(constraints):
                first = set_by.setdefault((name, field), entry)
                value, other = getattr(constraints, field), getattr(merged.get(name), field, None)
                if first is not entry and other != value:
                    raise SetupError(
                        f"{entry.where}table {name!r}: {entry.plugin!r} and {first.plugin!r} set "
                        f"different {field} ({value} and {other}). Remove the table from one of "
                        "the two entries."
                    )
            merged[name] = merged_constraints(merged.get(name, _UNSET), constraints)
    return merged


def _keep_optimizers(
    merged: dict[str, ParameterConstraints], optimizers: Mapping[str, TableOptimizer]
) -> None:
    """Exclude data-parallel sharding, which drops the optimizer of a table, where there is one."""
    for name, constraints in merged.items():
        kinds, optimizer = constraints.sharding_types, optimizers.get(name)
        if not kinds or optimizer is None or not optimizer.in_backward:
            continue
        others = [kind for kind in kinds if kind != _DATA_PARALLEL]
        if not others:
            raise SetupError(
                f"table {name!r} is data-parallel, but DistributedModelParallel would drop its "
                f"optimizer {optimizer.in_backward} (apply_optimizer_in_backward). Train the table "
                "with the dense optimizer, or use another sharding type."
            )
        merged[name] = replace(constraints, sharding_types=others)


def _of_left(
    module: EmbeddingModule,
    constraints: ParameterConstraints,
    wish: ParameterConstraints,
    device_type: str,
) -> ParameterConstraints:
    """Exclude kernels that TorchRec's own sharder offers for ``module`` but cannot run."""
    is_processed = isinstance(module.shardable, FeatureProcessedEmbeddingBagCollection)
    if is_processed and wish.sharding_types is None:
        kinds = [kind for kind in constraints.sharding_types or [] if kind not in _BY_ROWS]
        constraints = replace(constraints, sharding_types=kinds)
    if device_type == "cpu" and wish.compute_kernels is None:
        # Managed collision offers CUDA-only kernels on CPU too (torchrec 1.6 to 1.9).
        kernels = [EmbeddingComputeKernel.FUSED.value]
        constraints = replace(constraints, compute_kernels=kernels)
    return constraints


def _kinds(elementwise: bool, *, replicated: bool) -> list[str]:
    """Return the sharding types with which a table's optimizer trains like the unsharded table's.

    With row-wise Adagrad, each column shard would have its own optimizer state.
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
    """Set ``batch_sizes`` and ``pooling_factors`` from the profile, unless a plugin set them."""
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
    """Return the names of tables that the planner must not make data-parallel.

    Coalesced tables (whose distinct ids are sent once), and other tables of the same
    EmbeddingBagCollection, have a variable batch size per feature (VBE). TorchRec's data-parallel
    kernels do not support VBE for pooled tables, and compute wrong sequence gradients on CPU.
    Tables in ``exact`` may be data-parallel if their entry allows replication.
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


@dataclass(frozen=True)
class EntryConstraints:
    """Planner constraints that one entry sets per table; ``where`` names the entry in messages."""

    where: str
    plugin: str
    of_tables: Mapping[str, ParameterConstraints]


def entry_constraints(prepared: PreparedModel, tables: Sequence[Table]) -> list[EntryConstraints]:
    """Return the planner constraints of each sharding and cache entry, in file order."""
    registry = prepared.registry
    of_parts = {part.entry.field: part for part in prepared.plugin_strategies}
    found = []
    for entry in (*registry.sharding, *registry.cache):
        own = [table for table in tables if entry.matches(table.name)]
        asked: dict[str, ParameterConstraints] = {}
        each: Any
        for each in filter(None, (entry.plugin, of_parts.get(entry.field))):
            with plugin_call(entry.plugin, "constraints"):
                for name, constraints in each.constraints(own).items():
                    asked[name] = merged_constraints(asked.get(name, _UNSET), constraints)
        where = f"{registry.path}:{entry.line} {entry.field}: "
        found.append(EntryConstraints(where, entry.plugin.name, asked))
    return found


def set_fields(constraints: ParameterConstraints) -> list[str]:
    """Return the names of the fields that ``constraints`` sets."""
    return [
        field.name
        for field in fields(constraints)
        if getattr(constraints, field.name) != getattr(_UNSET, field.name)
    ]


def merged_constraints(
    first: ParameterConstraints, second: ParameterConstraints
) -> ParameterConstraints:
    """Return a copy of ``first`` with the fields that are set in ``second`` overridden."""
    return replace(first, **{field: getattr(second, field) for field in set_fields(second)})
