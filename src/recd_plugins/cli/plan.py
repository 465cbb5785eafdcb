"""``recd plan``: plan a model's tables for a cluster, or run another planner of a plugin."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from recd_plugins.cli.options import (
    OUTPUT,
    chosen_topology,
    manager_of,
    tell_broken,
    topology_options,
)
from recd_plugins.interfaces.plugin import part_call
from recd_plugins.planning.plan_mode import PlanMode, PlanQuestion, TablesPlan
from recd_plugins.report.output import error_console, output_console
from recd_plugins.runtime.files import write_json


class PlanModes:
    """The modes that plugins add to ``recd plan``, each with a flag and options.

    Attributes:
        params: click parameters of all modes.
    """

    def __init__(self, classes: Iterable[type[PlanMode]]) -> None:
        self.params: list[click.Option] = []
        self._modes: list[tuple[PlanMode, list[click.Option]]] = []
        for cls in classes:
            mode = cls()
            options = list(mode.options())
            for option in options:
                option.help = f"With {cls.flag}: {option.help or option.opts[0]}"
            self._modes.append((mode, options))
            self.params += [click.Option([cls.flag], is_flag=True, help=cls.help), *options]

    def chosen(self, ctx: click.Context) -> tuple[PlanMode | None, dict[str, Any]]:
        """Return (mode, its options) for the given flag, or (None, {}) if no flag is given.

        Raises click.UsageError for two flags, and for options of a mode without its flag.
        """
        given = {name for each in self.params if _given(ctx, each) for name in each.opts}
        flags = [mode.flag for mode, _ in self._modes if mode.flag in given]
        if len(flags) > 1:
            raise click.UsageError(
                f"{flags[0]} and {flags[1]} cannot be combined. Run recd plan once for each flag."
            )
        chosen, values = None, {}
        for mode, options in self._modes:
            if mode.flag in flags:
                chosen = mode
                values = {str(each.name): ctx.params[str(each.name)] for each in options}
            elif alone := [each.opts[0] for each in options if given & {*each.opts}]:
                named = " and ".join(alone)
                raise click.UsageError(
                    f"{named} needs {mode.flag}. Add {mode.flag}, or remove {named}."
                )
        return chosen, values


def _given(ctx: click.Context, param: click.Parameter) -> bool:
    source = ctx.get_parameter_source(str(param.name))
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)


def _batch_size(value: str) -> int | str:
    """Convert the value of ``--batch-size``, a positive number or ``auto``."""
    if value == "auto":
        return value
    if not value.isdecimal() or int(value) == 0:
        raise click.BadParameter(
            f"{value!r} is not a positive number of rows. Write a number or 'auto'."
        )
    return int(value)


class _Plan(click.Command):
    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *own, help_option = super().get_params(ctx)
        return [*own, *_modes(ctx).params, help_option]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption:
            tell_broken(manager_of(ctx))
            raise

    def get_help(self, ctx: click.Context) -> str:
        tell_broken(manager_of(ctx))
        return super().get_help(ctx)


def _modes(ctx: click.Context) -> PlanModes:
    if __name__ not in ctx.meta:
        ctx.meta[__name__] = PlanModes(manager_of(ctx).items("register_plans"))
    modes: PlanModes = ctx.meta[__name__]
    return modes


@click.command(cls=_Plan)
@click.argument("registry", type=click.Path(path_type=Path))
@topology_options
@click.option(
    "--batch-size",
    type=_batch_size,
    metavar="N|auto",
    help="Overrides training.batch_size. auto finds the largest batch size that fits.",
)
@click.option("--json", "json_path", type=OUTPUT, help="Write the full report to this JSON file.")
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    registry: Path,
    topology: str | None,
    nodes: int | None,
    ranks_per_node: int | None,
    batch_size: int | str | None,
    json_path: Path | None,
    **_of_modes: Any,
) -> None:
    """Plan the tables of REGISTRY's model for a cluster, without using the cluster.

    Shows the shards, the memory per rank and the predicted times, compared with the plan of plain
    TorchRec. Flags of plugins run another planner instead.

    \b
    recd plan registry.yaml --topology dgx-a100-80g --nodes 4 --batch-size auto
    """
    from recd_plugins import load_registry
    from recd_plugins.planning.topologies import MACHINE
    from recd_plugins.runtime.imports import silence_upstream

    chosen, options = _modes(ctx).chosen(ctx)
    mode = chosen or TablesPlan()
    largest = batch_size == "auto"
    given = {
        "--topology": topology not in (None, MACHINE),
        "--nodes": nodes,
        "--ranks-per-node": ranks_per_node,
        "--batch-size auto": largest,
    }
    takes = {"--batch-size auto": mode.takes_auto}
    if others := [
        name for name, value in given.items() if value and not takes.get(name, mode.takes_topology)
    ]:
        raise click.UsageError(f"{mode.flag} {mode.because}. Remove {' and '.join(others)}.")
    with part_call(mode, "check"):
        mode.check(options, largest)
    silence_upstream()
    loaded = load_registry(registry, plugins_dir=ctx.obj)
    topology = topology or loaded.training.topology or MACHINE
    spec = chosen_topology(loaded, topology, nodes, ranks_per_node)
    rows = None if largest else int(batch_size or loaded.training.batch_size)
    console, status = output_console(), error_console().status("planning")
    question = PlanQuestion(loaded, ctx.obj, topology, spec, rows, options, status.update)
    with status, part_call(mode, "plan"):
        answer = mode.plan(question)
    if json_path is not None:
        with part_call(mode, "as_json"):
            write_json(json_path, answer.as_json())
    console.print(answer.text, markup=False)
