"""``recd bench``: the one home of benchmarks."""

from __future__ import annotations

import importlib
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
    type=click.Choice(["small", "reference"]),
    default="small",
    show_default=True,
    help="small ends within a minute; reference is what the documentation quotes.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write the report here.",
)
def bench(name: str | None, size: str, json_path: Path | None) -> None:
    """Measure a figure that the documentation quotes; without NAME, list the benchmarks."""
    console = Console()
    if name is None:
        _list(console)
        return
    from recd_benchmarks.frame import report

    if name not in names():
        raise RecdError(f"no benchmark is named {name}; there are: {', '.join(names())}")
    benchmark: Any = importlib.import_module(f"recd_benchmarks.{name}")
    with Console(stderr=True).status(f"measuring {name}: {benchmark.workload(size)}"):
        result = report(name, benchmark, size)  # type: ignore[arg-type]
    _show(console, result)
    if json_path is not None:
        write_json(json_path, result)


def names() -> list[str]:
    """Every benchmark there is."""
    import recd_benchmarks

    found = (module.name for module in pkgutil.iter_modules(recd_benchmarks.__path__))
    return sorted(name for name in found if name not in ("batches", "frame", "tables"))


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


def _bound(value: float | str | None, better: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{'>=' if better == 'higher' else '<='} {value:g}"
