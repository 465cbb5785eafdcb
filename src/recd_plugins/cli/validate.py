"""The commands ``recd validate`` and ``recd schema``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from recd_plugins.cli.options import SETTINGS
from recd_plugins.config import RunConfig
from recd_plugins.config.from_file import load_registry
from recd_plugins.config.manager import PluginManager, Registered
from recd_plugins.config.run_config import (
    check_dataset,
    check_num_ids,
    feature_steps,
    num_embeddings,
    table_problems,
)
from recd_plugins.config.schema import registry_spec
from recd_plugins.interfaces import Chooser, DatasetWrapper, Sharding
from recd_plugins.interfaces.rows import table_name
from recd_plugins.planning.topologies import load_topology
from recd_plugins.runtime.errors import Problem, RecdError, RegistryError


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default="registry.yaml")
@SETTINGS
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def validate(ctx: click.Context, path: Path, settings: tuple[str, ...], as_json: bool) -> None:
    """Check a registry file.

    Checks the structure, the plugins and their options, the topology file, and the columns,
    features and tables of existing data. PATH is registry.yaml by default. KEY=VALUE overrides a
    value, as in recd run. Reads no rows. Table patterns of a model plugin are only checked when
    training starts.
    """
    try:
        registry = _checked(path, ctx.obj, settings)
    except RegistryError as error:
        if not as_json:
            raise
        problems = [asdict(problem) for problem in error.problems]
        click.echo(json.dumps({"ok": False, "problems": problems}, indent=2))
        ctx.exit(1)
    entries = len(registry.wrappers) + sum(len(registry.entries(kind)) for kind in registry.kinds)
    if as_json:
        click.echo(json.dumps({"ok": True, "entries": entries, "problems": []}, indent=2))
    else:
        click.echo(f"{path}: {entries} entries, ok")


def _checked(path: Path, plugins_dir: Path | None, settings: tuple[str, ...]) -> RunConfig:
    """Return the config. Raise RegistryError with all problems of the file."""
    wrong: list[Problem] = []
    try:
        registry = load_registry(path, plugins_dir=plugins_dir, settings=settings)
    except RegistryError as error:
        wrong += error.problems
        left = tuple(each for each in settings if each not in {problem.path for problem in wrong})
        if left != settings:  # also report the problems of the file
            try:
                _checked(path, plugins_dir, left)
            except RegistryError as others:
                wrong += others.problems
            raise RegistryError(list(dict.fromkeys(wrong))) from error
        if not all(problem.field.startswith("training.") for problem in wrong):
            raise
        # The section training does not affect the other checks.
        settings = (*settings, "training={}")
        registry = load_registry(path, plugins_dir=plugins_dir, settings=settings)
    for check in _checks(registry):
        try:
            check()
        except RegistryError as error:
            wrong += error.problems
    _raise_if(sorted(dict.fromkeys(wrong), key=lambda problem: problem.line))
    return registry


def _raise_if(problems: list[Problem]) -> None:
    if problems:
        raise RegistryError(problems)


def _checks(registry: RunConfig) -> Iterator[Callable[[], Any]]:
    """Yield the checks of a config. Features and tables are checked if the data is known."""
    yield partial(check_dataset, registry)
    yield partial(_check_topology, registry)
    with suppress(RecdError):  # reported when the data is needed
        schema = registry.dataset.known_schema()
        if schema is None:
            return
        yield partial(feature_steps, registry, schema)
        if registry.model is not None:
            yield lambda: _raise_if(table_problems(registry, schema))
            yield partial(registry.claim, "pooling", schema.sparse)
            if all(type(each.plugin).id_limit is Sharding.id_limit for each in registry.sharding):
                rows = num_embeddings(registry.model, schema.sparse)
                yield partial(check_num_ids, registry, schema, rows)
            tables = [table_name(feature) for feature in schema.sparse]
            for kind in ("sharding", "cache", "optimizer"):
                yield partial(registry.claim, kind, tables)


def _check_topology(registry: RunConfig) -> None:
    try:
        if registry.training.topology is not None:
            load_topology(registry.training.topology)
    except RegistryError:  # of its file
        raise
    except RecdError as error:
        problem = registry.problem(("training", "topology"), str(error))
        raise RegistryError([problem]) from error


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON. This is the default.")
@click.pass_obj
def schema(plugins_dir: Path | None, as_json: bool) -> None:  # noqa: ARG001
    """Print the JSON Schema of registry files.

    Editors complete and check YAML files with the schema. It includes the options of all plugins.
    """
    click.echo(json.dumps(registry_schema(PluginManager(plugins_dir)), indent=2))


def registry_schema(manager: PluginManager) -> dict[str, Any]:
    """Return the JSON Schema of registry files.

    The schema checks the ``options`` of an entry against the plugin that its key ``use`` names.
    """
    kinds = manager.kinds
    result = registry_spec(kinds.values()).model_json_schema()
    definitions = result["$defs"]
    result["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    wrappers = {
        name: registered
        for name, registered in manager.plugins["dataset"].items()
        if issubclass(registered.cls, DatasetWrapper)
    }
    wrap = definitions["DatasetSpec"]["properties"]["wrap"]
    general = {_put_entry(definitions, wrap, "wrapper", wrappers)}
    for kind, plugins in manager.plugins.items():
        others = wrappers if kind == "dataset" else {}
        usable = {name: plugins[name] for name in plugins if name not in others}
        section = result["properties"][kinds[kind].section]
        general.add(_put_entry(definitions, section, kind, usable))
    for name in general:
        del definitions[name]
    return result


def _put_entry(
    definitions: dict[str, Any], section: dict[str, Any], what: str, plugins: dict[str, Registered]
) -> str:
    # The section is a list of entries, an optional entry, or a required entry.
    holder = section.get("items") or section.get("anyOf", [section])[0]
    general = str(holder.pop("$ref")).rpartition("/")[2]
    entry = json.loads(json.dumps(definitions[general]))
    by_name = sorted(plugins.items())
    entry["title"] = f"{what} entry"
    entry["properties"]["use"]["enum"] = [name for name, _ in by_name]
    if by_name:  # JSON Schema does not allow an empty allOf
        entry["allOf"] = [
            _options_of(what, name, registered, definitions) for name, registered in by_name
        ]
    if choosers := [name for name, found in by_name if issubclass(found.cls, Chooser)]:
        entry["required"].remove("tables")
        uses = {"required": ["use"], "properties": {"use": {"enum": choosers}}}
        entry["allOf"].append({"if": uses, "else": {"required": ["tables"]}})
    definitions[f"{what}_entry"] = entry
    holder["$ref"] = f"#/$defs/{what}_entry"
    return general


def _options_of(
    kind: str, name: str, registered: Registered, definitions: dict[str, Any]
) -> dict[str, Any]:
    prefix = f"{kind}.{name}"
    options = registered.cls.Options.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
    for model, definition in options.pop("$defs", {}).items():
        definitions[f"{prefix}.{model}"] = definition
    definitions[prefix] = {**options, "title": name, "description": registered.cls.summary()}
    then: dict[str, Any] = {"properties": {"options": {"$ref": f"#/$defs/{prefix}"}}}
    if options.get("required"):
        then["required"] = ["options"]
    return {"if": _uses(name), "then": then}


def _uses(name: str) -> dict[str, Any]:
    return {"required": ["use"], "properties": {"use": {"const": name}}}
