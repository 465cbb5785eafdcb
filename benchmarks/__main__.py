"""The command ``python -m benchmarks``."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.files import write_json

BENCHMARKS = {
    "train": "training on 2 ranks, with RecD deduplication vs. stock TorchRec",
    "ablation": "ablation of RecD: throughput of the models rm1, rm2 and rm3",
    "storage": "disk space of a table clustered by session vs. ordered by time",
    "logs": "compression of logs sharded by session vs. sharded at random",
    "histories": "bytes and time of histories read from a store vs. layout list_dict",
    "reader": "rows per second from Parquet to tensors, clustered vs. interleaved",
    "convert": "time to build IKJTs vs. plain KJTs",
    "balance": "requests of uneven cost, dealt to ranks by cost vs. in order",
    "requests": "training on requests of 38 candidates, with plugins vs. stock TorchRec",
    "flexshard": "FlexShard's row tiers vs. row-wise sharding on 4 x 2 ranks",
    "scars": "SCARS' row cache vs. no cache: host memory traffic, hit rates and time",
    "network": "training over slow network links, with plugins vs. stock TorchRec",
    "serving": "requests per second and latency of examples/serving",
    "dlrm": "a training step of the DLRM paper's section 5.2 vs. plain PyTorch",
    "dynamic": "dynamic tables: lookups of raw ids vs. pandas and numpy",
    "host": "launches, syncs and copies of a GPU training step, counted on any machine",
}
_SIZE = click.Option(
    ["--size"],
    type=click.Choice(["tiny", "small", "reference"]),
    default="small",
    show_default=True,
    help="tiny only checks that the benchmark runs, small takes minutes, and reference produces "
    "the figures in the documentation.",
)
_JSON = click.Option(
    ["--json", "json_path"],
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report to this JSON file.",
)


class _Benchmarks(click.Group):
    """Click group with one command per benchmark; imports a benchmark only when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in BENCHMARKS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl(list(BENCHMARKS.items()))


@click.group(cls=_Benchmarks, no_args_is_help=True, subcommand_metavar="NAME [OPTIONS]")
def main() -> None:
    """Run a benchmark that the documentation quotes. NAME --help shows its options."""


def report(name: str, size: str = "small", **options: Any) -> dict[str, Any]:
    """Run a benchmark and return its report, in the format that ``--json`` writes."""
    from benchmarks._measure import machine

    module = importlib.import_module(f"benchmarks.{name}")
    return {"name": name, "machine": machine(), **asdict(module.run(size, **options))}


def _command(name: str) -> click.Command:
    module = importlib.import_module(f"benchmarks.{name}")
    own: list[click.Parameter] = list(getattr(module, "OPTIONS", ()))

    def measure(size: str, json_path: Path | None, **options: Any) -> None:
        try:
            found = report(name, size, **options)
        except RecdError as error:
            raise click.ClickException(str(error)) from error
        if json_path is not None:
            write_json(json_path, found)
        _show(found)

    return click.Command(name, callback=measure, help=module.__doc__, params=[_SIZE, *own, _JSON])


def _show(result: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=result["workload"])
    table.add_column("figure", overflow="fold", min_width=24)
    for heading in ("value", "min - max", "runs", "goal", "paper"):
        table.add_column(heading)
    for each in result["figures"]:
        unit = "" if each["unit"] == "ratio" else " " + each["unit"]
        sign = ">=" if each["better"] == "higher" else "<="
        table.add_row(
            each["figure"],
            f"{_number(each['value'])}{unit}",
            f"{_number(each['min'])} - {_number(each['max'])}",
            str(each["runs"]),
            "" if each["goal"] is None else f"{sign} {each['goal']:g}",
            "" if each["paper"] is None else str(each["paper"]),
        )
    console.print(table)
    for detail in result["details"]:
        table = Table(title=detail["title"])
        for number, heading in enumerate(detail["headings"]):
            table.add_column(heading, min_width=0 if number else 24)
        for row in detail["rows"]:
            table.add_row(*(each if isinstance(each, str) else f"{each:.4g}" for each in row))
        console.print(table)
    for note in result["notes"]:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
