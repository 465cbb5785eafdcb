"""``recd schema``: the JSON Schema of registry files, with the options of every plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from recd_plugins.interfaces import Chooser, DatasetWrapper
from recd_plugins.manager import PluginManager, Registered
from recd_plugins.registry.schema import registry_spec


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, the only form there is.")
@click.pass_obj
def schema(plugins_dir: Path | None, as_json: bool) -> None:  # noqa: ARG001
    """Print the JSON Schema of registry files.

    Editors that complete and check YAML take it; the options of every plugin are in it.
    """
    click.echo(json.dumps(registry_schema(PluginManager(plugins_dir)), indent=2))


def registry_schema(manager: PluginManager) -> dict[str, Any]:
    """A JSON Schema in which ``options`` has the shape that the plugin after ``use`` takes."""
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
    """Let the entries of a section have the options of ``plugins``.

    Returns:
        The name of the definition that they had, which is as it was.
    """
    # A list of entries, one or null, or one.
    holder = section.get("items") or section.get("anyOf", [section])[0]
    general = str(holder.pop("$ref")).rpartition("/")[2]
    entry = json.loads(json.dumps(definitions[general]))
    by_name = sorted(plugins.items())
    entry["title"] = f"{what} entry"
    entry["properties"]["use"]["enum"] = [name for name, _ in by_name]
    if by_name:  # an empty allOf is no JSON Schema
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
    """Where ``use`` is ``name``, options are those of its class."""
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
