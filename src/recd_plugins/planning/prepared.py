"""A model prepared by a registry, as a trainer uses it, and how entries change the model."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.compat.row_updates import kind_of_update, unheeded_argument
from recd_plugins.config import Entry, RunConfig, at_entry
from recd_plugins.config.entries import CheckedPart, call_class
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
from recd_plugins.interfaces.model_tables import (
    EmbeddingModule,
    embedding_modules,
    rows_by_feature,
)
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.model.sequence_pooling import put_poolings
from recd_plugins.planning.setting import id_limits
from recd_plugins.runtime.errors import PluginError, Problem, RegistryError, SetupError
from recd_plugins.sharding.batch_form import set_takes_stored_rows, takes_stored_rows
from recd_plugins.sharding.coalesced.input_dist import feature_groups
from recd_plugins.sharding.guards import guard

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

    from recd_plugins.data.loader import DataLoader
    from recd_plugins.interfaces import TrainPipeline
    from recd_plugins.interfaces.data_profile import DataProfile
    from recd_plugins.planning.planner import RegistryPlanner


logger = logging.getLogger(__name__)


class Prepared(PreparedModel):
    """A prepared model, and the parts of a trainer that suit it; ``prepare`` makes it."""

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
        """Return TorchRec's planner, told of sharding, caches and deduplication.

        Args:
            topology: the ranks and their memory; default: those of ``training.topology``, or
                machines like this one, by the three arguments after ``activation_bytes``.
            profile: lengths and dedupe factors of the features; default: measured on the first rows
                of the data.
            activation_bytes: to leave free on each rank for activations beside lookups; or a
                function that returns it, called by the rank that plans.
            world_size: number of ranks; default: of the process group, else of the registry.
            local_world_size: ranks per node; default: ``LOCAL_WORLD_SIZE``, else all ranks.
            device: of the tables; default: the one that the model was prepared for.
            constraints: TorchRec's, by table name; they go before the data, and must not
                contradict plugins.
            replicate: whether small tables may be data-parallel of the planner's accord. These
                train with the trainer's dense optimizer, which must have the rule of ``training:``,
                as ``recd_plugins.build_optimizer`` makes it. Tables whose parameters bring an
                optimizer never are.

        Raises:
            DataError: without a ``profile``: the data is missing or wrong.
            SetupError: plugins or ``constraints`` contradict each other. From ``plan``: no plan
                fits, a module has no sharder, or a table would lose its optimizer.
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
        """Return sharders of TorchRec's modules, exact on CPU too, and those of sharding plugins.

        The optimizer of tables runs in the backward pass, as ``training:`` says, unless
        ``fused_params`` or the parameter of a table (``apply_optimizer_in_backward``) names
        another; the parameter's wins.

        Args:
            base: sharders of a trainer. Those of TorchRec for EmbeddingBagCollection and
                EmbeddingCollection lend their fused_params, qcomm_codecs_registry and
                use_index_dedup to the exact ones; others keep their own, if they have some. Other
                module types stay unsharded, except those of plugins. Default: TorchRec's defaults.
            fused_params: FBGEMM's; they go before those of ``training:``, and with an ``optimizer``
                in their place.
            qcomm_codecs_registry: TorchRec's, for all modules.

        Raises:
            SetupError: two sharders are for one module type, one of ``base`` cannot be joined with
                the exact one, or an argument is given twice.
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
        """Return a resumable loader of this rank's share of a split.

        Batches are in host memory, pinned if ``device`` is a CUDA device.

        Raises:
            DataError: the data is missing or wrong.
            RegistryError: a pattern matches no feature.
        """
        from recd_plugins.data.loader import build_dataloader

        return build_dataloader(self.registry, rank, world_size, split, device, prepared=self)

    def train_pipeline(
        self, dmp: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> TrainPipeline:
        """Return TorchRec's pipelined training loop over ``dmp``, or that of ``pipeline:``.

        The first ``progress`` of TorchRec's raises RecdError if an embedding module is not
        pipelined.
        """
        from recd_plugins.sharding.pipeline import build_train_pipeline

        return build_train_pipeline(dmp, optimizer, device, self.registry)


def prepare_entries(
    registry: RunConfig,
    model: nn.Module,
    modules: Sequence[EmbeddingModule],
    setting: PlanContext,
    device_type: str | None,
) -> Prepared:
    """Put plugins of the registry into ``model``.

    Args:
        registry: without a chooser.
        model: not prepared.
        modules: its ``embedding_modules``.
        setting: the ranks.
        device_type: of the tables, if known.

    Raises:
        RegistryError: a pattern matches no table or feature, or two entries claim one.
        ExactnessError: a combination that cannot be exact.
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
        model = _rewritten(registry.path, model, entry, claimed, setting)
    if registry.sharding:
        modules = list(embedding_modules(model))
        placement = placement_of(modules, plugins)
    parts = prepare_parts(registry, tables, setting)
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
        setting=setting,
    )


def prepare_parts(
    registry: RunConfig, tables: Sequence[Table], setting: PlanContext
) -> dict[str, TableStrategy]:
    """Return the table strategies of sharding and cache entries, by the field of the entry.

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
    """Refuse entries that coalesce only some tables of a feature."""
    for entry in registry.sharding:
        for module in modules if entry.plugin.coalesces else ():
            if module.ours and any(entry.matches(table.name) for table in module.tables):
                found = module.shardable
                if isinstance(found, EmbeddingBagCollection):
                    configs: Sequence[Any] = found.embedding_bag_configs()
                else:
                    assert isinstance(found, EmbeddingCollection)
                    configs = found.embedding_configs()
                with at_entry(registry.path, entry):
                    feature_groups(configs, coalesced)


def _refuse_claims(registry: RunConfig, modules: Sequence[EmbeddingModule]) -> None:
    """Refuse entries for tables that are left to other sharders."""
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
    # A module in place of a collection of PooledSequences gets the stored rows, too.
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


def apply_optimizers(
    registry: RunConfig,
    modules: Sequence[EmbeddingModule],
    tables: Sequence[Table],
    device_type: str | None,
    parts: Mapping[str, TableStrategy],
) -> None:
    """Apply the optimizer entries to the parameters of tables, in place.

    Planner and sharders find them there, as after ``apply_optimizer_in_backward``.

    Args:
        registry: its sharding and cache entries may contradict its optimizer entries.
        modules: ``embedding_modules`` of the model, as plugins left it.
        tables: of the model as it was.
        device_type: of the tables, if known.
        parts: table strategies of sharding and cache entries, by the field of the entry.

    Raises:
        RegistryError: a pattern matches no table, two entries claim one, or a table cannot be
            trained so.
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
                    f"table {table.name} is in no EmbeddingBagCollection or EmbeddingCollection "
                    "any more, as a sharding entry replaced it: leave one of the two entries out"
                )
            for parameter in parameters[table.name]:
                _apply(update, parameter, table)
            logger.info("%s trains %s", entry.plugin.name, table.name)


def _check_other_entries(
    registry: RunConfig, table: Table, parts: Mapping[str, TableStrategy]
) -> None:
    """Refuse a table some rows of which another entry would train in another way."""
    for entry in (*registry.sharding, *registry.cache):
        if not entry.matches(table.name):
            continue
        where = f"{entry.plugin.name} ({entry.field}, line {entry.line})"
        part = parts.get(entry.field)
        if part is not None and not part.follows_optimizers:
            raise SetupError(
                f"table {table.name} has an optimizer of its own, and {where} trains rows by "
                "training.optimizer alone: leave one of the two entries out"
            )
        if getattr(entry.plugin, "replicates", False):
            raise SetupError(
                f"table {table.name} has an optimizer in the backward pass, and {where} puts it "
                "whole on every rank, where DistributedModelParallel drops that: leave one of the "
                "two entries out"
            )


def _update_of(entry: Entry[Optimizer], table: Table, device_type: str | None) -> RowUpdate:
    plugin = entry.plugin
    what = f"update of table {table.name}"
    with plugin_call(plugin, what):
        update = plugin.update(table)
    try:
        kind = kind_of_update(update.optimizer, update.arguments)
    except ValueError as error:
        raise PluginError(f"{plugin.title}: {what} returned {error}") from None
    if why := unheeded_argument(kind, update.arguments, device_type):
        raise SetupError(f"table {table.name}: {why}")
    return update


def _parameters(modules: Sequence[EmbeddingModule]) -> Mapping[str, list[nn.Parameter]]:
    """Parameters by table name; several if modules have tables of one name."""
    parameters: dict[str, list[nn.Parameter]] = defaultdict(list)
    for module in modules:
        # A subclass is what a sharding entry put in: those of the model take no entries.
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
            f"table {table.name} brings {brought[0].__name__} already "
            "(apply_optimizer_in_backward): leave that away, or the entry"
        )
    # Importing it takes 0.3 s, and most models have no such entry. Public in torchrec.optim, which
    # takes as long.
    from torch.distributed.optim import (  # type: ignore[attr-defined]
        _apply_optimizer_in_backward as apply_optimizer_in_backward,
    )

    try:
        # State that is made here is dropped when the table is sharded; a meta table needs none.
        # A copy, as TorchRec changes the arguments.
        with _disable_current_modes():
            apply_optimizer_in_backward(update.optimizer, [parameter], dict(update.arguments))
    except (TypeError, ValueError) as error:
        raise SetupError(f"table {table.name}: {update.optimizer.__name__}: {error}") from error
