"""A model prepared by a registry, as a trainer uses it, and how entries change the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.config import Entry, RunConfig, at_entry
from recd_plugins.config.entries import CheckedPart, call_class
from recd_plugins.data.prepared import PreparedModel, placement_of
from recd_plugins.data.preprocess import refuse_ids_apart
from recd_plugins.interfaces import Cache, PlanContext, Sharding, Split, Table, TableStrategy
from recd_plugins.interfaces.model_tables import (
    EmbeddingModule,
    embedding_modules,
    rows_by_feature,
)
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.model.sequence_pooling import put_poolings
from recd_plugins.planning.optimizer_entries import apply_optimizers
from recd_plugins.planning.setting import id_limits
from recd_plugins.runtime.errors import Problem, RegistryError, SetupError
from recd_plugins.sharding.batch_form import set_takes_stored_rows, takes_stored_rows
from recd_plugins.sharding.coalesced.groups import feature_groups
from recd_plugins.sharding.guards import guard

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

    from recd_plugins.data.loader import DataLoader
    from recd_plugins.interfaces import TrainPipeline
    from recd_plugins.interfaces.data_profile import DataProfile
    from recd_plugins.planning.planner import RegistryPlanner


logger = logging.getLogger(__name__)


class Prepared(PreparedModel):
    """What ``prepare`` returns: the model, and the parts of a trainer that suit it."""

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
        """TorchRec's planner, told of sharding, caches and deduplication; it checks the model.

        Args:
            topology: the ranks and their memory, as ``to_torchrec()`` of what
                ``recd_plugins.api.load_topology`` returns; without it that of
                ``training.topology``, or ``recd_plugins.api.default_topology``, of the
                three arguments after ``activation_bytes``.
            profile: lengths and dedupe factors of the features; without it they are measured, on
                the first rows of the data.
            activation_bytes: to leave free on each rank for what a forward pass keeps beside
                lookups; or what finds it out, called by the rank that plans.
            world_size: ranks; those of the process group, else of the registry, without it.
            local_world_size: ranks a node; ``LOCAL_WORLD_SIZE``, else all ranks, without it; the
                registry's where its ``world_size`` counts.
            device: of the tables; that which the model was prepared for, without it.
            constraints: TorchRec's, by table name, as a trainer would give them to its planner.
                They go before what is known of the data, and must not contradict plugins.
            replicate: whether small tables may be data-parallel where nobody asked for it. Such a
                table trains with the trainer's dense optimizer, so say it only where that has the
                rule of ``training:``, as ``recd_plugins.api.build_optimizer`` makes it.
                Tables whose parameters bring an optimizer never are.

        Raises:
            DataError: without a ``profile``: the data is missing or wrong.
            SetupError: plugins or ``constraints`` contradict each other. From ``plan``: there is
                no plan, a module has no sharder, or a table would lose its optimizer; says why.
        """
        from recd_plugins.planning.planner import build_planner

        for entry in () if replicate else self.registry.sharding:
            if entry.plugin.may_replicate:
                logger.warning(
                    "%s:%d %s: %s may have small tables on every rank, where the trainer's dense "
                    "optimizer has the rule of training: planner(replicate=True) says that it has; "
                    "without it these tables are sharded",
                    *(self.registry.path, entry.line, entry.field, entry.plugin.name),
                )
        return build_planner(
            self,
            topology,
            profile=profile,
            activation_bytes=activation_bytes,
            world_size=world_size,
            local_world_size=local_world_size,
            device=device,
            constraints=constraints,
            replicate=replicate,
        )

    def sharders(
        self,
        base: Sequence[ModuleSharder[nn.Module]] = (),
        *,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> list[ModuleSharder[nn.Module]]:
        """Sharders of TorchRec's modules, exact on CPU too, and those of the sharding plugins.

        The tables' optimizer runs inside the backward pass, as ``training:`` says, unless
        ``fused_params`` or the parameter of a table (``apply_optimizer_in_backward``) name another;
        TorchRec lets the parameter's win.

        Args:
            base: sharders of a trainer, as it would give them to DistributedModelParallel. Those of
                TorchRec for EmbeddingBagCollection and EmbeddingCollection lend their fused_params,
                qcomm_codecs_registry and use_index_dedup to the exact ones; others have their own,
                or where they have none what is said here. Module types that it lacks stay
                unsharded, but for those that plugins bring. Without it: TorchRec's defaults.
            fused_params: FBGEMM's; they go before those of ``training:``, and with an ``optimizer``
                in their place.
            qcomm_codecs_registry: TorchRec's, for all modules.

        Raises:
            SetupError: sharders of two types are for one module type, one of ``base`` cannot be
                joined with the exact one, or an argument is there twice.
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
        """A resumable loader of this rank's share of a split, whose batches suit the model.

        Batches are in host memory, pinned where ``device`` is a CUDA device.

        Raises:
            DataError: the data is missing or wrong.
            RegistryError: a pattern matches no feature.
        """
        from recd_plugins.data.loader import build_dataloader

        return build_dataloader(self.registry, rank, world_size, split, device, prepared=self)

    def train_pipeline(
        self, dmp: nn.Module, optimizer: Optimizer, device: torch.device
    ) -> TrainPipeline:
        """TorchRec's pipelined training loop over ``dmp``, or that of the section ``pipeline``.

        The first ``progress`` of TorchRec's raises RecdError where an embedding module is not
        pipelined.
        """
        from recd_plugins.sharding.pipeline import build_train_pipeline

        return build_train_pipeline(dmp, optimizer, device, self.registry)


logger = logging.getLogger(__name__)


def prepare_entries(
    registry: RunConfig, model: nn.Module, setting: PlanContext, device_type: str | None
) -> Prepared:
    """Put what the registry names into ``model``.

    Args:
        registry: says what goes where; none of its entries is a chooser.
        model: not prepared.
        setting: the ranks that it will be sharded for.
        device_type: of the tables, as far as it is known.

    Raises:
        RegistryError: a pattern matches no table or feature, or two entries claim one.
        ExactnessError: a combination that cannot be exact.
    """
    modules = list(embedding_modules(model))
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
    # What cannot be is refused before plugins change the model.
    placement_of(model, plugins)
    _refuse_split_features(registry, modules, coalesced)
    for entry in registry.sharding:
        claimed = [table for table in tables if claims.get(table.name) is entry]
        model = _rewritten(registry.path, model, entry, claimed, setting)
    parts = prepare_parts(registry, tables, setting)
    apply_optimizers(registry, model, tables, device_type, parts)
    put_poolings(registry, model)
    guard(model)
    return Prepared(
        registry,
        model,
        placement_of(model, plugins),
        num_embeddings,
        tuple(tables),
        parts,
        coalesced,
        setting=setting,
    )


def prepare_parts(
    registry: RunConfig, tables: Sequence[Table], setting: PlanContext
) -> dict[str, TableStrategy]:
    """The table parts of entries, by the field of the entry.

    Args:
        registry: its sharding and cache entries.
        tables: of the model.
        setting: the ranks that it will be sharded for.

    Raises:
        RegistryError: a pattern matches no table, two entries claim one, a plugin refuses a table,
            or a table with kernels of its own is on every rank or needs TorchRec's.
    """
    names = [table.name for table in tables]
    sharded, cached = registry.claim("sharding", names), registry.claim("cache", names)
    parts: dict[str, TableStrategy] = {}
    why: dict[str, str] = {}
    for entry in registry.sharding:
        claimed = [table for table in tables if sharded.get(table.name) is entry]
        if (part := _part(registry.path, entry, claimed, setting)) is not None:
            parts[entry.field] = part
            why |= CheckedPart(registry.path, entry, part).needs_stock_kernels()
    for cache in registry.cache:
        claimed = [table for table in tables if cached.get(table.name) is cache]
        if (part := _part(registry.path, cache, claimed, setting)) is not None:
            parts[cache.field] = part
            _check_kernels(registry.path, cache, part, sharded, why)
    return parts


def _refuse_split_features(
    registry: RunConfig, modules: Sequence[EmbeddingModule], coalesced: Collection[str]
) -> None:
    """Refuse entries that coalesce some tables of a feature, and leave others as they are."""
    for entry in registry.sharding:
        for module in modules if entry.plugin.coalesces else ():
            if module.ours and any(entry.matches(table.name) for table in module.tables):
                with at_entry(registry.path, entry):
                    feature_groups(_configs(module.shardable), coalesced)


def _configs(module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
    if isinstance(module, EmbeddingBagCollection):
        return module.embedding_bag_configs()
    assert isinstance(module, EmbeddingCollection), "of the two that are ours"
    return module.embedding_configs()


def _refuse_claims(registry: RunConfig, modules: Sequence[EmbeddingModule]) -> None:
    """Refuse entries that name tables which these sharders leave to others."""
    problems = [
        Problem(
            str(registry.path),
            entry.line,
            f"{entry.field}.tables",
            f"table {table.name} is left alone: {module.why_left}. Let the entry name others, or "
            "move the table into an EmbeddingBagCollection or EmbeddingCollection",
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
    setting: PlanContext,
) -> nn.Module:
    pooled = [name for name, module in model.named_modules() if takes_stored_rows(module)]
    with plugin_call(entry.plugin, "rewrite"), at_entry(path, entry):
        rewritten = entry.plugin.rewrite(model, tables, setting)
    # What stands in place of a collection of PooledSequences gets the rows that are stored, too.
    by_name = dict(rewritten.named_modules())
    for name in pooled:
        if name in by_name:
            set_takes_stored_rows(by_name[name])
    return rewritten


def _part(
    path: Path, entry: Entry[Sharding] | Entry[Cache], tables: list[Table], setting: PlanContext
) -> TableStrategy | None:
    with plugin_call(entry.plugin, "part"), at_entry(path, entry):
        return entry.plugin.part(tables, setting)


def _check_kernels(
    path: Path,
    entry: Entry[Cache],
    part: TableStrategy,
    sharded: Mapping[str, Entry[Sharding]],
    why: Mapping[str, str],
) -> None:
    """Refuse kernels of tables that are on every rank or need TorchRec's kernels."""
    kernels = call_class([CheckedPart(path, entry, part)], "kernels")
    if kernels is None:
        return
    for table in kernels.tables:
        if (sharding := sharded.get(table)) is None:
            continue
        where = f"{sharding.plugin.name} ({sharding.field}, line {sharding.line})"
        with at_entry(path, entry):
            if sharding.plugin.replicates:
                raise SetupError(
                    f"table {table} has a cache, and {where} puts it whole on every rank, where "
                    "nothing is fetched: leave one of them out, or shard the table by "
                    "rows, by columns or as a whole"
                )
            if table in why:
                raise SetupError(f"table {table} has a cache, and {where} {why[table]}")
    logger.info("%s caches %s", entry.plugin.name, ", ".join(kernels.tables))
