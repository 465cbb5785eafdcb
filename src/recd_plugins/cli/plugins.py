"""``recd plugins``: list the available plugins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Column, Table

from recd_plugins.cli.options import tell_broken
from recd_plugins.config.manager import PluginManager, Registered
from recd_plugins.interfaces import DatasetWrapper
from recd_plugins.report.output import output_console


def check_contributions(manager: PluginManager) -> None:
    """Call all hooks of all plugin packages. The manager records packages whose hooks fail.

    Raises PluginError if a plugin file in ``--plugins-dir`` cannot be loaded.
    """
    manager.items("register_commands", cli=click.Group())
    for hook in ("register_starts", "register_plans", "register_reports"):
        manager.items(hook)


@click.command()
@click.option("--kind", help="List only plugins of this kind, such as sharding.")
@click.option("--kinds", is_flag=True, help="List the plugin kinds instead of plugins.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def plugins(plugins_dir: Path | None, kind: str | None, kinds: bool, as_json: bool) -> None:
    """List the available plugins.

    Shows the kind, name and description of each plugin, and its distribution or file. Also lists
    installed plugin packages that failed to load, with the reason.
    """
    manager = PluginManager(plugins_dir)
    check_contributions(manager)
    if kind is not None and kind not in manager.kinds:
        known = ", ".join(map(repr, manager.kinds))
        raise click.BadParameter(
            f"{kind!r} is not a plugin kind. Use one of: {known}.", param_hint="--kind"
        )
    if kinds:
        _list_kinds(manager, as_json)
        return
    found: list[dict[str, Any]] = [
        {
            "kind": of_kind,
            "name": name,
            "wrapper": issubclass(registered.cls, DatasetWrapper),
            "from": registered.origin,
            "summary": registered.cls.summary(),
        }
        for of_kind, by_name in manager.plugins.items()
        if kind in (None, of_kind)
        for name, registered in sorted(by_name.items(), key=_wrappers_last)
    ]
    tell_broken(manager)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    console = output_console()
    for origin in manager.origins:
        if brought := [plugin for plugin in found if plugin["from"] == origin]:
            console.print(f"[bold]{escape(origin)}[/]", soft_wrap=True)
            console.print(_table(brought))


def _list_kinds(manager: PluginManager, as_json: bool) -> None:
    found = [
        {
            "kind": kind.name,
            "section": kind.section,
            "claims": kind.claims,
            "from": manager.origin_of(kind),
            "description": kind.description,
        }
        for kind in manager.kinds.values()
    ]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for kind in found:
        click.echo(f"{kind['kind']} ({kind['from']}): {kind['description']}")
        click.echo(f"  section {kind['section']}, claims {kind['claims']}")


def _wrappers_last(item: tuple[str, Registered]) -> tuple[bool, str]:
    name, registered = item
    return issubclass(registered.cls, DatasetWrapper), name


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(Column(no_wrap=True), Column(), box=None, show_header=False, padding=(0, 2, 0, 2))
    kind = ""
    for plugin in found:
        of_plugin = "dataset, wrapper" if plugin["wrapper"] else plugin["kind"]
        if of_plugin != kind:
            kind = of_plugin
            table.add_row(f"[cyan]{kind}[/]")
        table.add_row(f"  {escape(plugin['name'])}", escape(plugin["summary"]))
    return table
