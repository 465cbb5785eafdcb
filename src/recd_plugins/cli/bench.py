"""``recd bench``: the one home of benchmarks."""

from __future__ import annotations

import inspect
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recd_plugins.cli.benchmarks import Benchmarks
from recd_plugins.cli.options import OUTPUT, contributed, tell_broken
from recd_plugins.cli.part_call import code_call
from recd_plugins.errors import PluginError
from recd_plugins.files import write_json
from recd_plugins.output_console import error_console, output_console


class _Bench(click.Group):
    """One command a benchmark, which has the options that the benchmark has."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(contributed(ctx, "register_benchmarks", Benchmarks)[0].modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        benchmarks, manager = contributed(ctx, "register_benchmarks", Benchmarks)
        if cmd_name not in benchmarks.modules:
            tell_broken(manager)
        return _command(cmd_name, benchmarks.load(cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Names alone: what they measure is in their modules, which import torch."""
        with formatter.section("Benchmarks"):
            formatter.write_text(", ".join(self.list_commands(ctx)))


@click.group(cls=_Bench, invoke_without_command=True, subcommand_metavar="[NAME] [OPTIONS]")
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure a figure that the documentation quotes; without NAME, list the benchmarks.

    recd bench NAME --help shows the options of one.
    """
    if ctx.invoked_subcommand is not None:
        return
    benchmarks, manager = contributed(ctx, "register_benchmarks", Benchmarks)
    table = Table("benchmark", "measures")
    for name in sorted(benchmarks.modules):
        try:
            table.add_row(name, escape(benchmarks.load(name).SUMMARY))
        except PluginError as error:
            table.add_row(name, f"[red]{escape(str(error))}[/]")
    output_console().print(table)
    tell_broken(manager)


def _command(name: str, benchmark: Any) -> click.Command:
    """``recd bench NAME``."""
    own = [
        parameter
        for parameter in inspect.signature(benchmark.run).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    with code_call(f"benchmark {name}", "reading the types of run", benchmark.run):
        types_by_name = get_type_hints(benchmark.run)
    if untyped := [each.name for each in own if each.name not in types_by_name]:
        raise PluginError(
            f"benchmark {name}: run takes {untyped[0]} without a type, by which its option is "
            f"made; write one, as {untyped[0]}: int = 1000"
        )
    words = getattr(benchmark, "HELP", {})
    params: list[click.Parameter] = [
        click.Option(
            ["--size"],
            type=click.Choice(["tiny", "small", "reference"]),
            default="small",
            show_default=True,
            help="small ends within a minute or a few; reference is what the documentation "
            "quotes; tiny only shows that a benchmark runs, and its figures mean nothing.",
        ),
        *(_option(each, types_by_name[each.name], words.get(each.name)) for each in own),
        click.Option(
            ["--json", "json_path"],
            type=OUTPUT,
            help="Write the report here.",
        ),
    ]
    if hasattr(benchmark, "plot"):
        path = click.Path(path_type=Path, file_okay=False, writable=True)
        words_of_plot = "Draw what the benchmark found into this folder, as SVG."
        params.append(click.Option(["--plot", "plot_folder"], type=path, help=words_of_plot))

    def measure(
        size: str, json_path: Path | None, plot_folder: Path | None = None, **options: Any
    ) -> None:
        from recd_plugins.testing.benchmark import report

        what = f"benchmark {name}"
        with code_call(what, "workload", benchmark.workload):
            words = benchmark.workload(size, **options)
        console = error_console()
        if not console.is_terminal:
            console.print(f"measuring {name}: {words}", soft_wrap=True, markup=False)
        with (
            console.status(f"measuring {name}: {words}"),
            code_call(what, "run", benchmark.run),
        ):
            result = report(name, benchmark, size, **options)  # type: ignore[arg-type]
        if json_path is not None:
            write_json(json_path, result)
        drawn = []
        if plot_folder is not None:
            with code_call(what, "plot", benchmark.plot):
                drawn = benchmark.plot(result, plot_folder)
        console = output_console()
        _show(console, result)
        for each in drawn:
            console.print(f"{each}", soft_wrap=True)

    return click.Command(name, params=params, callback=measure, help=benchmark.SUMMARY)


def _option(parameter: inspect.Parameter, kind: Any, words: str | None) -> click.Option:
    """The option for a parameter of a benchmark's ``run``, by its annotation."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (each for each in get_args(kind) if each is not type(None))
    flag = f"--{parameter.name.replace('_', '-')}"
    if kind is bool:
        no = "" if parameter.default is False else f"/--no-{flag[2:]}"
        return click.Option([flag + no], is_flag=True, help=words, **_default(parameter))
    if get_origin(kind) is Literal:
        kind = click.Choice(get_args(kind))
    return click.Option([flag], type=kind, help=words, **_default(parameter))


def _default(parameter: inspect.Parameter) -> dict[str, Any]:
    if parameter.default is parameter.empty:
        return {"required": True}
    return {"default": parameter.default, "show_default": parameter.default is not False}


def _show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=result["workload"])
    table.add_column("figure", overflow="fold", min_width=24)
    for heading in ("value", "min - max", "runs", "goal", "paper"):
        table.add_column(heading)
    for figure in result["figures"]:
        unit = "" if figure["unit"] == "ratio" else " " + figure["unit"]
        table.add_row(
            figure["figure"],
            f"{figure['value']:.3g}{unit}",
            f"{figure['min']:.3g} - {figure['max']:.3g}",
            str(figure["runs"]),
            _bound(figure["goal"], figure["better"]),
            _bound(figure["paper"], figure["better"]),
        )
    console.print(table)
    for detail in result["details"]:
        table = Table(title=detail["title"])
        for number, heading in enumerate(detail["headings"]):
            justify: Any = "right" if number else "left"
            table.add_column(heading, justify=justify, min_width=0 if number else 18)
        for row in detail["rows"]:
            table.add_row(*map(_cell, row))
        console.print(table)
    for note in result["notes"]:
        console.print(note, markup=False, highlight=False)


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _bound(value: float | str | None, better: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{'>=' if better == 'higher' else '<='} {value:g}"
