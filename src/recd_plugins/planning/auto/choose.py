"""The registry with what was chosen in place of ``auto``: the same on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result

from recd_plugins.data.arrow import sparse_column
from recd_plugins.data.first_rows import first_rows
from recd_plugins.data.row_pipeline import fit_converter
from recd_plugins.distributed.rank_agreement import check_agreement
from recd_plugins.errors import NoPlanError, RecdError, SetupError
from recd_plugins.interfaces import Setting, Sharding, Table
from recd_plugins.model_tables import embedding_modules, rows_by_feature
from recd_plugins.planning.auto.chosen import Chosen, GroupChoice
from recd_plugins.planning.auto.data import DataOfChoices, profile_of_choices
from recd_plugins.planning.auto.entries import auto_of, with_offers
from recd_plugins.planning.auto.groups import Group, Offer, groups_of
from recd_plugins.planning.auto.search import best_choices
from recd_plugins.planning.auto.trials import Choices, Trials
from recd_plugins.planning.decided import document
from recd_plugins.planning.performance import collective_seconds
from recd_plugins.processes import portable
from recd_plugins.registry import Entry, Registry
from recd_plugins.registry.no_data import NoDataset
from recd_plugins.values.data_profile import DataProfile
from recd_plugins.values.stage_costs import StageCosts

# To make an id unique: by a hash table on a core, by sorting on a GPU. Assumed where it was not
# measured.
_UNIQUE_SECONDS = {"cpu": 15e-9, "cuda": 1e-9}


@dataclass(frozen=True)
class _Found:
    """What one rank tells the others.

    Attributes:
        offers: that were chosen, with the names of their tables.
        profile: of the data, with what they coalesce.
        report: of the choice.
    """

    offers: list[tuple[Offer, list[str]]]
    profile: DataProfile
    report: Chosen


def choose(
    registry: Registry, model: nn.Module, setting: Setting
) -> tuple[Registry, Setting, Chosen | None]:
    """The registry and setting to go on with, and what ``auto`` came to; as they are without it.

    Where this process is one of the ranks that the setting is of, rank 0 chooses for all of them:
    a collective call.

    Args:
        registry: that may have an entry ``auto``.
        model: not prepared; it stays as it is.
        setting: of the model.

    Raises:
        RegistryError: a pattern matches no table, or two entries claim one.
        NoPlanError: nothing that may be chosen fits into memory.
        PluginError: a plugin fails, or offers what it does not take.
        SetupError: ranks have other registries, models or data than one another.
        RecdError: the data or the model does not go with the registry.
    """
    auto = auto_of(registry)
    if auto is None:
        return registry, setting, None
    ours = [t for module in embedding_modules(model) if module.ours for t in module.tables]
    claims = registry.claim("sharding", [table.name for table in ours])
    tables = [table for table in ours if claims.get(table.name) is auto]
    others = tuple(table.name for table in ours if claims.get(table.name) is not auto)
    # Tables that have no memory yet are looked at by a mode, and trials have models of their own.
    with _disable_current_modes():
        found = _of_one_rank(
            registry, ours, setting, partial(_find, registry, auto, model, tables, others, setting)
        )
    data = DataOfChoices(setting.data, tables, found.profile)
    chosen = with_offers(registry, auto, found.offers)
    return chosen, replace(setting, data=data), found.report


def _of_one_rank(
    registry: Registry, tables: Sequence[Table], setting: Setting, find: Callable[[], _Found]
) -> _Found:
    if not dist.is_initialized() or not dist.get_world_size() == setting.world_size > 1:
        return find()
    asked = {
        "the registry file": document(registry),
        "the model's tables": {table.name: asdict(table) for table in tables},
        "the first rows of the data": _digest(registry),
    }
    check_agreement("choosing by auto", asked)

    def told() -> _Found | RecdError:
        try:
            return find()
        except RecdError as error:
            return portable(error)

    found = invoke_on_rank_and_broadcast_result(dist.group.WORLD, 0, told)
    if isinstance(found, RecdError):
        raise found
    return found


def _digest(registry: Registry) -> str:
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
    registry: Registry,
    auto: Entry[Sharding],
    model: nn.Module,
    tables: Sequence[Table],
    others: tuple[str, ...],
    setting: Setting,
) -> _Found:
    costs = _costs(setting)
    modules = list(embedding_modules(model))
    rows = rows_by_feature(
        table for module in modules if module.takes_rows for table in module.tables
    )
    ours = [table for module in modules if module.ours for table in module.tables]
    profile = profile_of_choices(registry, tables, ours, setting.data, rows)
    known = replace(setting, data=DataOfChoices(setting.data, tables, profile))
    groups = groups_of(tables, registry.offering, known)
    trials = Trials(registry, auto, groups, model, known, costs)
    best = best_choices(trials, groups)
    if trials(best).seconds is None:
        start = trials((None,) * len(groups))
        assert start.error is not None, "the search starts there"
        raise _nothing(registry, auto, start.error) from start.error
    report = _report(trials, groups, best, costs, others)
    report = replace(report, measured=setting.measured)
    return _Found(trials.offers(best), trials.profile(best), report)


def _report(
    trials: Trials,
    groups: Sequence[Group],
    best: Choices,
    costs: StageCosts,
    others: tuple[str, ...],
) -> Chosen:
    found, start = trials(best), trials((None,) * len(groups))
    assert found.seconds is not None, "it is the best"
    made = trials.made
    choices = []
    for number, (group, offer) in enumerate(zip(groups, best, strict=True)):
        tried = [(other[number], trial) for other, trial in made.items() if other[number] != offer]
        # The shortest step with each comes last, and stays.
        longest_first = sorted(tried, key=lambda each: -each[1].total)
        possible = {o: trial.total for o, trial in longest_first if trial.seconds is not None}
        refused = {o: trial.why for o, trial in tried if o and trial.error and o not in possible}
        choices.append(
            GroupChoice(
                tuple(table.name for table in group.tables),
                group.pooled,
                offer,
                tuple(sorted(possible.items(), key=lambda each: each[1])),
                tuple(refused.items()),
            )
        )
    return Chosen(
        tuple(choices),
        others,
        found.seconds,
        max(found.works, key=costs.all_to_all.seconds),
        None if start.seconds is None else start.total,
        costs,
        len(made),
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


def _nothing(registry: Registry, auto: Entry[Sharding], error: Exception) -> Exception:
    """The error of a registry of which nothing can be planned."""
    if not isinstance(error, NoPlanError):
        return error
    return NoPlanError(
        f"{registry.path}:{auto.line} {auto.field}: auto finds nothing that fits among what "
        f"installed plugins offer; with the tables left to the planner: {error}"
    )
