"""Optimizer entries: the update of each table, attached to its parameter for TorchRec."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.compat.row_updates import kind_of_update, unheeded_argument
from recd_plugins.config import Entry, RunConfig, at_entry
from recd_plugins.interfaces import Optimizer, RowUpdate, Table, TableStrategy
from recd_plugins.interfaces.model_tables import embedding_modules
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.errors import PluginError, SetupError

logger = logging.getLogger(__name__)


def apply_optimizers(
    registry: RunConfig,
    model: nn.Module,
    tables: list[Table],
    device_type: str | None,
    parts: Mapping[str, TableStrategy],
) -> None:
    """Apply the optimizer entries to the parameters of tables, in place.

    Planner and sharders find them there, as after ``apply_optimizer_in_backward``.

    Args:
        registry: its sharding and cache entries may contradict its optimizer entries.
        model: as plugins left it.
        tables: of the model as it was.
        device_type: that it will be trained on, if known.
        parts: table strategies of sharding and cache entries, by the field of the entry.

    Raises:
        RegistryError: a pattern matches no table, two entries claim one, or a table cannot be
            trained so.
    """
    claims = registry.claim("optimizer", [table.name for table in tables])
    for table in tables:
        if (entry := claims.get(table.name)) is None:
            continue
        with at_entry(registry.path, entry):
            _check_other_entries(registry, table, parts)
            update = _update_of(entry, table, device_type)
            parameters = list(_parameters(model, table.name))
            if not parameters:
                raise SetupError(
                    f"table {table.name} is in no EmbeddingBagCollection or EmbeddingCollection "
                    "any more, as a sharding entry replaced it: leave one of the two entries out"
                )
            for parameter in parameters:
                _apply(update, parameter, table)
            logger.info("%s trains %s", entry.plugin.name, table.name)


def _check_other_entries(
    registry: RunConfig, table: Table, parts: Mapping[str, TableStrategy]
) -> None:
    """Refuse a table some rows of which another entry would train another way."""
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


def _parameters(model: nn.Module, table: str) -> Iterator[nn.Parameter]:
    """The parameters of a table; several where modules have tables of one name."""
    for module in embedding_modules(model):
        # A subclass is what a sharding entry put in: those of the model take no entries.
        found = module.shardable
        if isinstance(found, EmbeddingBagCollection) and table in found.embedding_bags:
            yield found.embedding_bags[table].weight
        elif isinstance(found, EmbeddingCollection) and table in found.embeddings:
            yield found.embeddings[table].weight


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
        # State that is made here goes when the table is sharded: of one that has no memory yet none
        # is needed. A dict of its own: TorchRec changes what it finds there.
        with _disable_current_modes():
            apply_optimizer_in_backward(update.optimizer, [parameter], dict(update.arguments))
    except (TypeError, ValueError) as error:
        raise SetupError(f"table {table.name}: {update.optimizer.__name__}: {error}") from error
