"""The registry with what was chosen in place of a chooser: the same on all ranks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial

import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result

from recd_plugins.activity import said_if_long
from recd_plugins.data.arrow import sparse_column
from recd_plugins.data.row_pipeline import fit_converter
from recd_plugins.data.wrapped_dataset import first_rows
from recd_plugins.distributed.rank_agreement import check_agreement
from recd_plugins.errors import (
    NoPlanError,
    Problem,
    RecdError,
    RegistryError,
    SetupError,
)
from recd_plugins.imports import without_collections
from recd_plugins.interfaces import Choice, Chooser, Setting, Table
from recd_plugins.model_tables import embedding_modules, names_of_several
from recd_plugins.planning.choosing.data import DataOfChoices, profile_of_choices
from recd_plugins.planning.choosing.entries import chooser_of, with_offers
from recd_plugins.planning.choosing.question import RegistryQuestion
from recd_plugins.planning.decided import document
from recd_plugins.planning.performance import collective_seconds
from recd_plugins.planning.setting import rows_looked_up
from recd_plugins.plugin_call import plugin_call
from recd_plugins.processes import portable
from recd_plugins.registry import Entry, RunConfig, at_entry
from recd_plugins.registry.run_config import NoDataset
from recd_plugins.values.data_profile import DataProfile
from recd_plugins.values.stage_costs import StageCosts
from recd_plugins.words import shortened

logger = logging.getLogger(__name__)

# To make an id unique: by a hash table on a core, by sorting on a GPU. Assumed where it was not
# measured.
_UNIQUE_SECONDS = {"cpu": 15e-9, "cuda": 1e-9}
# Seconds until it is said.
_LONG_CHOICE = 15.0


@dataclass(frozen=True)
class _Found:
    """What one rank tells the others.

    Attributes:
        choice: of the chooser.
        profile: of the data, with what is coalesced by it.
    """

    choice: Choice
    profile: DataProfile


def choose(
    registry: RunConfig, model: nn.Module, setting: Setting
) -> tuple[RunConfig, Setting, Choice | None]:
    """The registry and setting to go on with, and what was chosen; as they are without a chooser.

    Where this process is one of the ranks that the setting is of, rank 0 chooses for all of them:
    a collective call.

    Args:
        registry: that may have a chooser.
        model: not prepared; it stays as it is.
        setting: of the model.

    Raises:
        RegistryError: a pattern matches no table, two entries claim one, none is left to the
            chooser, or two that are have one name.
        NoPlanError: nothing that may be chosen fits into memory.
        PluginError: a plugin fails, or offers what it does not take.
        SetupError: ranks have other registries, models or data than one another.
        RecdError: the data or the model does not go with the registry.
    """
    chooser = chooser_of(registry)
    if chooser is None:
        return registry, setting, None
    ours = [t for module in embedding_modules(model) if module.ours for t in module.tables]
    claims = registry.claim("sharding", [table.name for table in ours])
    tables = tuple(table for table in ours if claims.get(table.name) is chooser)
    others = tuple(table.name for table in ours if claims.get(table.name) is not chooser)
    if others and not tables:
        problem = (
            "other entries name every table that it would choose for, and it takes what they "
            "leave: leave it out"
        )
        raise RegistryError([Problem(str(registry.path), chooser.line, chooser.field, problem)])
    if twice := names_of_several(tables):
        problem = (
            f"several modules have tables of one name, {shortened(twice)}, and it chooses by name: "
            "give each a name of its own, or let another entry name them"
        )
        raise RegistryError([Problem(str(registry.path), chooser.line, chooser.field, problem)])
    find = partial(_find, registry, chooser, model, tables, others, setting)
    # Tables that have no memory yet are looked at by a mode, and trials have models of their own.
    with without_collections(), _disable_current_modes():
        found = _of_one_rank(registry, chooser, ours, setting, find)
    data = DataOfChoices(setting.data, tables, found.profile)
    chosen = with_offers(registry, chooser, found.choice.offered)
    return chosen, replace(setting, data=data), found.choice


def _of_one_rank(
    registry: RunConfig,
    chooser: Entry[Chooser],
    tables: Sequence[Table],
    setting: Setting,
    find: Callable[[], _Found],
) -> _Found:
    if not dist.is_initialized() or not dist.get_world_size() == setting.world_size > 1:
        return find()
    asked = {
        "the registry file": document(registry),
        "the model's tables": {table.name: asdict(table) for table in tables},
        "the first rows of the data": _digest(registry),
    }
    check_agreement(f"choosing by {chooser.plugin.name}", asked)

    def told() -> _Found | RecdError:
        try:
            return find()
        except RecdError as error:
            return portable(error)

    found = invoke_on_rank_and_broadcast_result(dist.group.WORLD, 0, told)
    if isinstance(found, RecdError):
        raise found
    return found


def _digest(registry: RunConfig) -> str:
    """Of the ids of the first batch; the converter is fitted by it, as by who chooses."""
    if isinstance(registry.dataset, NoDataset):
        return ""
    rows = first_rows(registry)
    fit_converter(registry, rows)
    digest = hashlib.sha256()
    for name in registry.dataset.schema().sparse:
        values, offsets = sparse_column(rows, name)
        digest.update(offsets.tobytes())
        digest.update(values[offsets[0] : offsets[-1]].tobytes())
    return digest.hexdigest()


def _find(
    registry: RunConfig,
    chooser: Entry[Chooser],
    model: nn.Module,
    tables: Sequence[Table],
    others: tuple[str, ...],
    setting: Setting,
) -> _Found:
    if registry.unloaded:
        _warn_of_unloaded(chooser.plugin.name, registry.unloaded)
    costs = _costs(setting, chooser.plugin.name)
    modules = list(embedding_modules(model))
    rows = rows_looked_up(registry, modules)
    ours = [table for module in modules if module.ours for table in module.tables]
    profile = profile_of_choices(registry, tables, ours, setting.data, rows)
    known = replace(setting, data=DataOfChoices(setting.data, tables, profile))
    question = RegistryQuestion(tables, others, known, costs, registry, chooser, model)
    plugin = chooser.plugin
    try:
        with (
            said_if_long(
                _LONG_CHOICE, f"{plugin.name} still tries plans, of tables: {len(tables)}"
            ),
            plugin_call(plugin, "choose"),
        ):
            choice = plugin.choose(question)
    except NoPlanError as error:
        raise NoPlanError(
            f"{registry.path}:{chooser.line} {chooser.field}: {plugin.name} finds nothing that "
            f"fits among what installed plugins offer; with the tables left to the planner: {error}"
        ) from error
    except RecdError:
        with at_entry(registry.path, chooser):
            raise
    return _Found(choice, question.profile(choice.offered))


@cache
def _warn_of_unloaded(name: str, reasons: tuple[str, ...]) -> None:
    """Say once what the choice may differ by from machine to machine."""
    logger.warning("%s chooses without what cannot be loaded: %s", name, "; ".join(reasons))


def _costs(setting: Setting, name: str) -> StageCosts:
    """Those of the setting; what it has as free, and is not, takes what is assumed of it."""
    if setting.costs is None:
        raise SetupError(
            f"{name} chooses by what a step costs, and the setting that the model is prepared for "
            "has no costs: leave the setting out, or make it by the costs of a topology"
        )
    all_to_all, other = setting.costs.all_to_all, setting.costs.other
    if not all_to_all.collectives:
        assumed = {"collectives": collective_seconds(setting.device_type)}
        all_to_all = all_to_all.model_copy(update=assumed)
    if not other.ids_made_unique:
        assumed = {"ids_made_unique": _UNIQUE_SECONDS[setting.device_type]}
        other = other.model_copy(update=assumed)
    return setting.costs.model_copy(update={"all_to_all": all_to_all, "other": other})
