"""What every rank decides by itself, before it plans with the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn
from torchrec.distributed.types import ModuleSharder

from recd_plugins.data.prepared import PreparedModel
from recd_plugins.distributed.entry_constraints import entry_constraints
from recd_plugins.interfaces import Plugin
from recd_plugins.model_tables import embedding_modules, tables_of
from recd_plugins.planning.table_optimizers import table_optimizers
from recd_plugins.planning.topologies import MACHINE, load_topology
from recd_plugins.registry import Entry, RunConfig
from recd_plugins.registry.run_config import plugin_versions
from recd_plugins.values.data_profile import DataProfile
from recd_plugins.versions import __version__, installed_set

#: Of ``training:``, what a rank may have of its own.
_OWN = {"workers", "hang_notice", "hang_timeout"}


def decided(
    prepared: PreparedModel,
    profile: DataProfile,
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
) -> dict[str, Any]:
    """By what it is, in words, for ``check_agreement``."""
    registry = prepared.registry
    seen = asdict(profile)
    del seen["source"]  # has the path of a file
    named = registry.training.topology
    # Each node reads a file of its own.
    cluster = None if named in (None, MACHINE) else load_topology(str(named)).model_dump()
    return {
        "the versions": {
            "recd-plugins": __version__,
            "packages": installed_set(),
            "plugins": plugin_versions(registry),
        },
        "the registry file": document(registry),
        **({"the topology": cluster} if cluster else {}),
        "the model's tables": {
            each.path: {table.name: asdict(table) for table in each.tables}
            for each in embedding_modules(module)
        },
        "what plugins ask of the plan": _asked(prepared, module),
        "the tables' optimizers": table_optimizers(module, sharders),
        "the deduplicated features": dict(registry.converter.dedupe_factors()),
        "the profile of the data": seen,
    }


def _asked(prepared: PreparedModel, module: nn.Module) -> dict[str, Any]:
    """By plugin and table, what each rank holds the plan to, which one rank makes for all."""
    found: dict[str, Any] = {}
    for entry in entry_constraints(prepared, tables_of(module)):
        for table, constraints in entry.of_tables.items():
            words = {
                "sharding_types": constraints.sharding_types,
                "compute_kernels": constraints.compute_kernels,
            }
            # In any order: that of a set is another in every process.
            asked = {name: sorted(each) for name, each in words.items() if each}
            found.setdefault(entry.plugin, {}).setdefault(table, {}).update(asked)
    return found


def document(registry: RunConfig) -> dict[str, Any]:
    """What ranks do together: options as plugins were made with, defaults too."""
    entries = {
        # Those that look on may do so with options of their own, and all of them do it together.
        name: [
            {"use": each.plugin.name} if kind.observes else _entry(each)
            for each in registry.entries(name)
        ]
        for name, kind in registry.kinds.items()
    }
    return {
        **{kind: of_kind for kind, of_kind in entries.items() if of_kind},
        "wrap": [_entry(entry) for entry in registry.wrappers],
        "model": registry.model and registry.model.model_dump(mode="json"),
        "training": registry.training.model_dump(mode="json", exclude=_OWN),
    }


def _entry(entry: Entry[Plugin]) -> dict[str, Any]:
    plugin = entry.plugin
    options = plugin.options.model_dump(mode="json", exclude=set(plugin.free_options))
    return {"use": plugin.name, "for": list(entry.patterns), "options": options}
