"""``recd validate``: everything that is wrong with a registry file, without reading rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from recd_plugins.errors import Problem, RecdError, RegistryError
from recd_plugins.planning.topologies import load_topology
from recd_plugins.registry import RunConfig
from recd_plugins.registry.from_file import load_registry
from recd_plugins.registry.run_config import check_dataset


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default="registry.yaml")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def validate(ctx: click.Context, path: Path, as_json: bool) -> None:
    """Check a registry file.

    Its shape, its plugins and their options, the file of its training.topology, and whether these
    suit the columns of the data where it is there; PATH is registry.yaml if not given. Rows are not
    read: what patterns match shows when training starts.
    """
    try:
        registry = load_registry(path, plugins_dir=ctx.obj)
        if found := _problems(registry):
            raise RegistryError(found)
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


def _problems(registry: RunConfig) -> list[Problem]:
    """What does not suit the data, and what is wrong with the topology."""
    problems: list[Problem] = []
    try:
        check_dataset(registry)
    except RegistryError as error:
        problems += error.problems
    if registry.training.topology is None:
        return problems
    try:
        load_topology(registry.training.topology)
    except RegistryError as error:  # of its file
        problems += error.problems
    except RecdError as error:
        problems.append(registry.problem(("training", "topology"), str(error)))
    return problems
