"""``recd bench``: the one home of benchmarks."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from recd_plugins.errors import RecdError
from recd_plugins.files import write_json


@click.command()
@click.argument("name", required=False)
@click.option(
    "--size",
    type=click.Choice(["tiny", "small", "reference"]),
    default="small",
    show_default=True,
    help="small ends within a minute; reference is what the documentation quotes; tiny only shows "
    "that a benchmark runs, and its figures mean nothing.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Where a benchmark of training runs; the CPU without it.",
)
@click.option("--only", metavar="PART", help="One model or part of a benchmark that has several.")
@click.option(
    "--scale",
    type=int,
    metavar="N",
    help="Rows, cache and batch of scars are those of Criteo divided by N; 1 needs 16 GB.",
)
@click.option("--theory", is_flag=True, help="Only what scars reckons: no training, seconds.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write the report here.",
)
@click.option(
    "--plot",
    "plot_folder",
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    help="Draw what a benchmark found into this folder, as SVG.",
)
def bench(
    name: str | None,
    size: str,
    device: str | None,
    only: str | None,
    scale: int | None,
    theory: bool,
    json_path: Path | None,
    plot_folder: Path | None,
) -> None:
    """Measure a figure that the documentation quotes; without NAME, list the benchmarks."""
    console = Console()
    if name is None:
        _list(console)
        return
    from recd_benchmarks.frame import report

    if name not in names():
        raise RecdError(f"no benchmark is named {name}; there are: {', '.join(names())}")
    benchmark: Any = importlib.import_module(f"recd_benchmarks.{name}")
    chosen = {"device": device, "only": only, "scale": scale, "theory": theory or None}
    options = {option: value for option, value in chosen.items() if value is not None}
    for option in options:
        if option not in inspect.signature(benchmark.run).parameters:
            raise RecdError(f"benchmark {name} has no --{option}; leave it out")
    if plot_folder is not None and not hasattr(benchmark, "plot"):
        raise RecdError(f"benchmark {name} has no --plot; leave it out")
    with Console(stderr=True).status(f"measuring {name}: {benchmark.workload(size, **options)}"):
        result = report(name, benchmark, size, **options)  # type: ignore[arg-type]
    _show(console, result)
    if json_path is not None:
        write_json(json_path, result)
    if plot_folder is not None:
        for path in benchmark.plot(result, plot_folder):
            console.print(f"{path}", soft_wrap=True)


def names() -> list[str]:
    """Every benchmark there is."""
    import recd_benchmarks

    modules = pkgutil.iter_modules(recd_benchmarks.__path__)
    found = (module.name for module in modules if not module.ispkg)
    return sorted(name for name in found if name not in ("batches", "frame", "svg", "tables"))


def _list(console: Console) -> None:
    table = Table("benchmark", "measures")
    for name in names():
        table.add_row(name, importlib.import_module(f"recd_benchmarks.{name}").SUMMARY)
    console.print(table)


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
