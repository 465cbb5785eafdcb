"""Prepared models, and the functions that apply entries of a run config to a model."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.compat.row_updates import kind_of_update, unheeded_argument
from recd_plugins.config import Entry, RunConfig, at_entry
from recd_plugins.config.entries import PluginStrategy
from recd_plugins.data.prepared import PreparedModel, placement_of
from recd_plugins.data.preprocess import refuse_ids_apart
from recd_plugins.interfaces import (
    Cache,
    Optimizer,
    PlanContext,
    RowUpdate,
    Sharding,
    Split,
    Table,
    TableStrategy,
)
from recd_plugins.interfaces.model_tables import EmbeddingModule, embedding_modules, rows_by_feature
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.model.sequence_pooling import put_poolings
from recd_plugins.planning.plan_context import id_limits, plan_context
from recd_plugins.runtime.errors import Problem, RegistryError, SetupError
from recd_plugins.sharding.batch_form import accepts_deduplicated, set_accepts_deduplicated
from recd_plugins.sharding.coalesced.input_dist import feature_groups
from recd_plugins.sharding.guards import guard

if TYPE_CHECKING:
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

    from recd_plugins.data.loader import DataLoader
    from recd_plugins.interfaces import TrainPipeline
    from recd_plugins.interfaces.data_profile import DataProfile
    from recd_plugins.planning.planner import RegistryPlanner


logger = logging.getLogger(__name__)


class Prepared(PreparedModel):
    """A prepared model with its planner, sharders, data loader and pipeline; see ``prepare``."""

    def planner(
        self,
        topology: Topology | None = None,
        *,
        profile: DataProfile | None = None,
        activation_bytes: int | Callable[[], int] = 0,
        world_size: int | None = None,
        local_world_size: int | None = None,
        device: torch.device | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        replicate: bool = False,
    ) -> RegistryPlanner:
        """Return TorchRec's planner with the constraints and costs of this model's plugins.

        Args:
            topology: ranks and their memory; default: ``training.topology``, or machines like this
                one with ``world_size`` and ``local_world_size`` ranks on ``device``.
            profile: lengths and dedupe factors of the features; default: measured on the data.
            activation_bytes: bytes per rank to reserve for activations, or a function that returns
                this number, called on the planning rank.
            world_size, local_world_size: number of ranks, and ranks per node; default: those of the
                process group and ``LOCAL_WORLD_SIZE``, else of the run config.
            device: device of the tables; default: the device that the model was prepared for.
            constraints: dict from table name to TorchRec's ParameterConstraints. They override the
                data and must not contradict plugins.
            replicate: whether the planner may make small tables data-parallel. Your dense optimizer
                then trains them and must use the settings of ``training:``, as
                ``recd_plugins.build_optimizer`` does. Tables with their own optimizer are never
                replicated.

        Raises:
            DataError: ``profile`` is None, and the data is missing or invalid.
            SetupError: plugins or ``constraints`` contradict each other. The method ``plan`` also
                raises it if no plan fits, a module has no sharder, or a table would lose its
                optimizer.
        """
        from recd_plugins.planning.planner import RegistryPlanner
        from recd_plugins.planning.topologies import machine_of

        registry, context = self.registry, self.context
        if topology is None:
            if device is None and context is not None and torch.cuda.is_available():
                device = torch.device(context.device_type)
            spec = machine_of(registry.training, world_size, local_world_size, device)
            topology = spec.to_torchrec()
        profile = profile or self.measured_profile()
        planner = RegistryPlanner(
            self, topology, profile, activation_bytes, constraints or {}, replicate
        )
        planner.constraints(self.model, self.sharders())
        return planner

    def measured_profile(self) -> DataProfile:
        """Measure the profile of the training data after conversion and preprocessing."""
        from recd_plugins.planning.profile import measure_profile

        return measure_profile(
            self.registry,
            num_embeddings=self.num_embeddings,
            coalesced=[table for table in self.tables if table.name in self.coalesced],
            others=self.tables,
        )

    def sharders(
        self,
        base: Sequence[ModuleSharder[nn.Module]] = (),
        *,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> list[ModuleSharder[nn.Module]]:
        """Return the sharders of this package, of plugins and of TorchRec for this model.

        The optimizers of tables run in the backward pass. An ``apply_optimizer_in_backward`` on a
        parameter overrides ``fused_params``, which override ``training:``.

        Args:
            base: your own sharders. TorchRec's sharders of EmbeddingBagCollection and
                EmbeddingCollection are replaced by this package's, with the same fused_params,
                qcomm_codecs_registry and use_index_dedup. Module types without a sharder in
                ``base`` or in a plugin stay unsharded. Default: TorchRec's default sharders.
            fused_params: FBGEMM's fused_params. They are merged into those that ``training:``
                defines, or replace all of them if they contain ``optimizer``.
            qcomm_codecs_registry: TorchRec's codecs registry, for all modules.

        Raises:
            SetupError: two sharders have the same module type, a sharder in ``base`` cannot be
                replaced, or an argument is set both here and on a sharder in ``base``.
        """
        from recd_plugins.sharding.build import build_sharders

        return build_sharders(
            self, base, fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry
        )

    def dataloader(
        self,
        rank: int,
        world_size: int,
        split: Split = "train",
        device: torch.device | None = None,
    ) -> DataLoader:
        """Return a resumable data loader over this rank's part of a split.

        Batches are in host memory, pinned if ``device`` is a CUDA device.

        Raises:
            DataError: the data is missing or invalid.
            RegistryError: a pattern matches no feature.
        """
        from recd_plugins.data.loader import build_dataloader

        return build_dataloader(self.registry, rank, world_size, split, device, prepared=self)

    def train_pipeline(
        self, dmp: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> TrainPipeline:
        """Return the train pipeline for ``dmp``: the one set in ``pipeline:``, or the default."""
        from recd_plugins.sharding.pipeline import build_train_pipeline

        return build_train_pipeline(dmp, optimizer, device, self.registry)


def prepare_entries(
    registry: RunConfig,
    model: nn.Module,
    modules: Sequence[EmbeddingModule],
    context: PlanContext,
    device_type: str | None,
) -> Prepared:
    """Apply the entries of a run config without a chooser to an unprepared ``model``, in place.

    Raises:
        RegistryError: a pattern matches no table or feature, or two entries select the same one.
        ExactnessError: a combination of plugins would train incorrectly.
    """
    tables = [table for module in modules if module.ours for table in module.tables]
    _refuse_claims(registry, modules)
    refuse_ids_apart(registry, tables)
    num_embeddings = rows_by_feature(
        (table for module in modules if module.takes_rows for table in module.tables),
        id_limits(registry, tables),
    )
    claims = registry.claim("sharding", [table.name for table in tables])
    for kind in ("cache", "optimizer"):
        registry.claim(kind, [table.name for table in tables])
    plugins = {name: entry.plugin for name, entry in claims.items()}
    coalesced = frozenset(name for name, plugin in plugins.items() if plugin.coalesces)
    placement = placement_of(modules, plugins)
    _refuse_split_features(registry, modules, coalesced)
    for entry in registry.sharding:
        claimed = [table for table in tables if claims.get(table.name) is entry]
        model = _rewritten(registry.path, model, entry, claimed, context)
    if registry.sharding:
        modules = list(embedding_modules(model))
        placement = placement_of(modules, plugins)
    parts = prepare_parts(registry, tables, context)
    apply_optimizers(registry, modules, tables, device_type, parts)
    put_poolings(registry, model)
    guard(model)
    return Prepared(
        registry,
        model,
        placement,
        num_embeddings,
        tuple(tables),
        parts,
        coalesced,
        context=context,
    )


def prepare_parts(
    registry: RunConfig, tables: Sequence[Table], context: PlanContext
) -> dict[str, TableStrategy]:
    """Return a dict from sharding or cache entry, such as "cache[0]", to its TableStrategy.

    Raises:
        RegistryError: a pattern matches no table, two entries select the same table, or a plugin
            refuses a table. Also if a table with custom kernels is replicated or needs TorchRec's
            kernels.
    """
    names = [table.name for table in tables]
    sharded, cached = registry.claim("sharding", names), registry.claim("cache", names)
    parts: dict[str, TableStrategy] = {}
    why: dict[str, str] = {}
    for entry in registry.sharding:
        claimed = [table for table in tables if sharded.get(table.name) is entry]
        if (part := _part(registry.path, entry, claimed, context)) is not None:
            parts[entry.field] = part
            why |= PluginStrategy(registry.path, entry, part).needs_stock_kernels()
    for cache in registry.cache:
        claimed = [table for table in tables if cached.get(table.name) is cache]
        if (part := _part(registry.path, cache, claimed, context)) is not None:
            parts[cache.field] = part
            _check_kernels(registry.path, cache, part, sharded, why)
    return parts


def _refuse_split_features(
    registry: RunConfig, modules: Sequence[EmbeddingModule], coalesced: Collection[str]
) -> None:
    """Raise an error if a feature looks up coalesced tables (``coalesce: true``) and others."""
    for entry in registry.sharding:
        for module in modules if entry.plugin.coalesces else ():
            if module.ours and any(entry.matches(table.name) for table in module.tables):
                found: Any = module.shardable
                bags = isinstance(found, EmbeddingBagCollection)
                configs = found.embedding_bag_configs() if bags else found.embedding_configs()
                with at_entry(registry.path, entry):
                    feature_groups(configs, coalesced)


def _refuse_claims(registry: RunConfig, modules: Sequence[EmbeddingModule]) -> None:
    """Raise RegistryError if an entry selects a table that only TorchRec's sharders support."""
    problems = [
        Problem(
            str(registry.path),
            entry.line,
            f"{entry.field}.tables",
            f"table {table.name!r} cannot be used in this entry, because {module.why_left}. "
            "Remove the table from the entry, or move it into an EmbeddingBagCollection or "
            "EmbeddingCollection.",
        )
        for entry in (*registry.sharding, *registry.cache, *registry.entries("optimizer"))
        for module in modules
        if not module.ours
        for table in module.tables
        if entry.matches(table.name)
    ]
    if problems:
        raise RegistryError(problems)


def _rewritten(
    path: Path,
    model: nn.Module,
    entry: Entry[Sharding],
    tables: list[Table],
    context: PlanContext,
) -> nn.Module:
    pooled = [name for name, module in model.named_modules() if accepts_deduplicated(module)]
    with plugin_call(entry.plugin, "rewrite"), at_entry(path, entry):
        rewritten = entry.plugin.rewrite(model, tables, context)
    # A module that replaces a collection of PooledSequences gets the stored rows, too.
    by_name = dict(rewritten.named_modules())
    for name in pooled:
        if name in by_name:
            set_accepts_deduplicated(by_name[name])
    return rewritten


def rewritten(registry: RunConfig, model: nn.Module) -> nn.Module:
    """Return ``model`` as the sharding entries rewrite it, to use it without sharding."""
    modules = list(embedding_modules(model))
    context = plan_context(registry, modules)
    tables = [table for module in modules if module.ours for table in module.tables]
    claims = registry.claim("sharding", [table.name for table in tables])
    for entry in registry.sharding:
        claimed = [table for table in tables if claims.get(table.name) is entry]
        model = _rewritten(registry.path, model, entry, claimed, context)
    return model


def _part(
    path: Path, entry: Entry[Sharding] | Entry[Cache], tables: list[Table], context: PlanContext
) -> TableStrategy | None:
    with plugin_call(entry.plugin, "strategy"), at_entry(path, entry):
        return entry.plugin.strategy(tables, context)


def _check_kernels(
    path: Path,
    entry: Entry[Cache],
    part: TableStrategy,
    sharded: Mapping[str, Entry[Sharding]],
    why: Mapping[str, str],
) -> None:
    """Raise an error if a table with custom kernels is replicated or needs TorchRec's kernels."""
    with plugin_call(entry.plugin, "kernels", type(part)), at_entry(path, entry):
        kernels = type(part).kernels([part])
    if kernels is None:
        return
    for table in kernels.tables:
        if (sharding := sharded.get(table)) is None:
            continue
        where = f"{sharding.plugin.name!r} ({sharding.field}, line {sharding.line})"
        with at_entry(path, entry):
            if sharding.plugin.replicates:
                raise SetupError(
                    f"table {table!r} has a cache, but {where} replicates the table on every rank, "
                    "where a cache has no use. Remove the table from one of the two entries, or "
                    "shard it row-wise, column-wise or table-wise."
                )
            if table in why:
                raise SetupError(f"table {table!r} has a cache, but {where} {why[table]}")
    logger.info("%r caches %s", entry.plugin.name, ", ".join(map(repr, kernels.tables)))


def apply_optimizers(
    registry: RunConfig,
    modules: Sequence[EmbeddingModule],
    tables: Sequence[Table],
    device_type: str | None,
    parts: Mapping[str, TableStrategy],
) -> None:
    """Apply optimizer entries to table parameters, as ``apply_optimizer_in_backward`` does.

    ``modules`` are those of the prepared model, and ``tables`` those before preparation. ``parts``
    maps an entry, such as "cache[0]", to its TableStrategy.

    Raises:
        RegistryError: a pattern matches no table, two entries select the same table, or the
            optimizer does not support a table.
    """
    claims = registry.claim("optimizer", [table.name for table in tables])
    parameters = _parameters(modules) if claims else {}
    for table in tables:
        if (entry := claims.get(table.name)) is None:
            continue
        with at_entry(registry.path, entry):
            _check_other_entries(registry, table, parts)
            update = _update_of(entry, table, device_type)
            if table.name not in parameters:
                raise SetupError(
                    f"table {table.name!r} is no longer in an EmbeddingBagCollection or "
                    "EmbeddingCollection, because a sharding entry replaced its module. Remove the "
                    "optimizer entry or the sharding entry."
                )
            for parameter in parameters[table.name]:
                _apply(update, parameter, table)
            logger.info("%r trains %r", entry.plugin.name, table.name)


def _check_other_entries(
    registry: RunConfig, table: Table, parts: Mapping[str, TableStrategy]
) -> None:
    """Raise an error if a sharding or cache entry cannot use the table's own optimizer."""
    for entry in (*registry.sharding, *registry.cache):
        if not entry.matches(table.name):
            continue
        where = f"{entry.plugin.name!r} ({entry.field}, line {entry.line})"
        part = parts.get(entry.field)
        if part is not None and not part.follows_optimizers:
            raise SetupError(
                f"table {table.name!r} has its own optimizer entry, but {where} trains the rows "
                "with training.optimizer only. Remove one of the two entries."
            )
        if getattr(entry.plugin, "replicates", False):
            raise SetupError(
                f"table {table.name!r} has its own optimizer entry, but {where} replicates the "
                "table, so DistributedModelParallel would drop this optimizer. Remove one of the "
                "two entries."
            )


def _update_of(entry: Entry[Optimizer], table: Table, device_type: str | None) -> RowUpdate:
    with plugin_call(entry.plugin, f"update of table {table.name!r}"):
        update = entry.plugin.update(table)
        kind = kind_of_update(update.optimizer, update.arguments)
    if why := unheeded_argument(kind, update.arguments, device_type):
        raise SetupError(f"table {table.name!r}: {why}")
    return update


def _parameters(modules: Sequence[EmbeddingModule]) -> Mapping[str, list[nn.Parameter]]:
    """Return a dict from table name to parameters; table names may occur in several modules."""
    parameters: dict[str, list[nn.Parameter]] = defaultdict(list)
    for module in modules:
        # Subclasses come from sharding entries. Other sharders shard the model's own subclasses.
        found, tables = module.shardable, dict[str, Any]()
        if isinstance(found, EmbeddingBagCollection):
            tables = dict(found.embedding_bags.items())
        elif isinstance(found, EmbeddingCollection):
            tables = dict(found.embeddings.items())
        for name, table in tables.items():
            parameters[name].append(table.weight)
    return parameters


def _apply(update: RowUpdate, parameter: nn.Parameter, table: Table) -> None:
    if brought := getattr(parameter, "_optimizer_classes", []):
        raise SetupError(
            f"table {table.name!r} already has the optimizer {brought[0].__name__} "
            "(apply_optimizer_in_backward). Remove this optimizer, or the optimizer entry of the "
            "table."
        )
    # Imported here, since it takes 0.3 s and most models have no such entry.
    from torch.distributed.optim import (  # type: ignore[attr-defined]
        _apply_optimizer_in_backward as apply_optimizer_in_backward,
    )

    # This state is dropped when the table is sharded. TorchRec changes the arguments, so copy them.
    with _disable_current_modes():
        apply_optimizer_in_backward(update.optimizer, [parameter], dict(update.arguments))
