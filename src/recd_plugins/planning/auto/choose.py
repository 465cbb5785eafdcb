"""The registry with what was chosen in place of ``auto``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from recd_plugins.errors import NoPlanError, SetupError
from recd_plugins.interfaces import Setting, Sharding, Table
from recd_plugins.interfaces.auto import Auto
from recd_plugins.model_tables import embedding_modules, rows_by_feature
from recd_plugins.planning.auto.chosen import Chosen, GroupChoice
from recd_plugins.planning.auto.groups import Group, groups_of
from recd_plugins.planning.auto.search import best_choices, changed
from recd_plugins.planning.auto.trials import Choices, DataOfChoices, Trials
from recd_plugins.planning.performance import collective_seconds
from recd_plugins.planning.profile import measure_profile
from recd_plugins.planning.setting import RegistryData, off_meta
from recd_plugins.registry import Entry, Registry
from recd_plugins.values.data_profile import DataProfile
from recd_plugins.values.stage_costs import StageCosts

# To make an id unique: by a hash table on a core, by sorting on a GPU. Assumed where it was not
# measured.
_UNIQUE_SECONDS = {"cpu": 15e-9, "cuda": 1e-9}
# Rows of the data that are looked at, at least.
_LEAST_ROWS = 2048


def choose(
    registry: Registry, model: nn.Module, setting: Setting
) -> tuple[Registry, Setting, Chosen | None]:
    """The registry and setting to go on with, and what ``auto`` came to; as they are without it.

    The same in every process.

    Args:
        registry: that may have an entry ``auto``.
        model: not prepared; it stays as it is.
        setting: of the model.

    Raises:
        RegistryError: a pattern matches no table, or two entries claim one.
        NoPlanError: nothing that may be chosen fits into memory.
        PluginError: a plugin fails, or offers what it does not take.
        RecdError: the data or the model does not go with the registry.
    """
    auto = next((entry for entry in registry.sharding if isinstance(entry.plugin, Auto)), None)
    if auto is None:
        return registry, setting, None
    modules = list(embedding_modules(model))
    ours = [table for module in modules if module.ours for table in module.tables]
    claims = registry.claim("sharding", [table.name for table in ours])
    tables = [table for table in ours if claims.get(table.name) is auto]
    others = tuple(table.name for table in ours if claims.get(table.name) is not auto)
    costs = _costs(setting)
    rows = rows_by_feature(
        table for module in modules if module.takes_rows for table in module.tables
    )
    whole = _profile(registry, tables, setting, rows)
    data = DataOfChoices(setting.data, tables, whole)
    groups = groups_of(tables, registry.offering, replace(setting, data=data))
    trials = Trials(registry, auto, groups, model, setting, data, costs)
    best = best_choices(trials, groups)
    start = trials((None,) * len(groups))
    if trials(best).seconds is None:
        assert start.error is not None, "the search starts there"
        raise _nothing(registry, auto, start.error) from start.error
    chosen = trials.registry(best)
    return chosen, trials.setting(chosen), _report(trials, groups, best, costs, others)


def _report(
    trials: Trials,
    groups: Sequence[Group],
    best: Choices,
    costs: StageCosts,
    others: tuple[str, ...],
) -> Chosen:
    found, start = trials.as_planned(best), trials((None,) * len(groups))
    assert found.seconds is not None, "what was planned in haste can be planned"
    choices = []
    for number, (group, offer) in enumerate(zip(groups, best, strict=True)):
        alone = changed(best, groups, (number,))
        tried = [(other[number], trials(other)) for other in alone]
        possible = [(other, trial.total) for other, trial in tried if trial.seconds is not None]
        refused = [(other, trial.why) for other, trial in tried if other and trial.error]
        choices.append(
            GroupChoice(
                tuple(table.name for table in group.tables),
                group.pooled,
                offer,
                min(possible, key=lambda each: each[1], default=None),
                tuple(refused),
            )
        )
    return Chosen(
        tuple(choices),
        others,
        found.seconds,
        max(found.works, key=costs.all_to_all.seconds),
        None if start.seconds is None else start.total,
        costs,
        trials.count,
    )


def _costs(setting: Setting) -> StageCosts:
    """Those of the setting; what it has as free, and is not, takes what is assumed of it."""
    if setting.costs is None:
        raise SetupError(
            "auto chooses by what a step costs, and the setting that the model is prepared for has "
            "no costs: leave the setting out, or make it by the costs of a topology"
        )
    all_to_all, other = setting.costs.all_to_all, setting.costs.other
    if not all_to_all.collectives:
        assumed = {"collectives": collective_seconds(setting.device_type)}
        all_to_all = all_to_all.model_copy(update=assumed)
    if not other.ids_made_unique:
        assumed = {"ids_made_unique": _UNIQUE_SECONDS[setting.device_type]}
        other = other.model_copy(update=assumed)
    return setting.costs.model_copy(update={"all_to_all": all_to_all, "other": other})


def _profile(
    registry: Registry, tables: list[Table], setting: Setting, rows: dict[str, int]
) -> DataProfile:
    """Of the setting's data, with what coalescing any of ``tables`` would send.

    That of a registry's own data is of more rows than one small batch has: what is chosen depends
    on it.
    """
    known = setting.data.profile()
    with off_meta():
        measured = measure_profile(
            registry, num_embeddings=rows, coalesced=tables, least_rows=_LEAST_ROWS
        )
    if isinstance(setting.data, RegistryData):
        known = replace(measured, distinct=known.distinct)
    return replace(known, distinct={**known.distinct, **measured.distinct})


def _nothing(registry: Registry, auto: Entry[Sharding], error: Exception) -> Exception:
    """The error of a registry of which nothing can be planned."""
    if not isinstance(error, NoPlanError):
        return error
    return NoPlanError(
        f"{registry.path}:{auto.line} {auto.field}: auto finds nothing that fits among what "
        f"installed plugins offer; with the tables left to the planner: {error}"
    )
