"""``recd plan``: the sharding plan of a registry's model for any cluster, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from recd_plugins.cli.options import (
    ABOVE_0,
    OUTPUT,
    SHARE,
    check_reports,
    chosen_topology,
    report_options,
    topology_options,
)
from recd_plugins.cli.plan_cache import (
    CACHE_OPTIONS,
    cache_options,
    check_cache_options,
    plan_cache,
)
from recd_plugins.cli.plan_readers import check_reader_options, plan_readers, reader_options
from recd_plugins.cli.plan_tiers import plan_tiers
from recd_plugins.files import write_json


class _BatchSize(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Rows, or ``auto``."""

    name = "N|auto"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """A positive number, or ``auto``."""
        if value == "auto":
            return "auto"
        try:
            number = int(value)
        except ValueError:
            number = 0
        if number < 1:
            self.fail(f"{value!r} is neither a number of rows nor auto", param, ctx)
        return number


@click.command()
@click.argument("registry", type=click.Path(path_type=Path))
@topology_options
@click.option(
    "--batch-size",
    type=_BatchSize(),
    help="Rows of a rank, in place of training.batch_size; auto finds the most that fit.",
)
@click.option(
    "--tiers",
    is_flag=True,
    help="Plan tiers of rows instead: what flexshard's entries choose, and what others would give.",
)
@click.option(
    "--budget",
    type=ABOVE_0,
    metavar="RATIO",
    help="With --tiers: memory of a rank over that of row-wise, in place of the entries' own.",
)
@click.option(
    "--overlap",
    type=SHARE,
    metavar="SHARE",
    help="With --tiers: how much of the other collectives' time work hides, 0 to 1, likewise.",
)
@cache_options
@reader_options
@report_options("Write the whole report here.", "Write a picture of memory and times here")
@click.option(
    "--calibrate",
    "calibrate_path",
    type=OUTPUT,
    help="First train a few steps here, and write this machine, with what they cost, as a topology "
    "to this YAML file; --topology takes it. With --tiers: collectives, and memory of copied rows; "
    "with --cache: iterations, and rows that are fetched.",
)
@click.pass_obj
def plan(
    plugins_dir: Path | None,
    /,
    registry: Path,
    topology: str,
    nodes: int | None,
    ranks_per_node: int | None,
    batch_size: int | str | None,
    tiers: bool,
    budget: float | None,
    overlap: float | None,
    cache: bool,
    readers: bool,
    stall_target: float | None,
    json_path: Path | None,
    plot_path: Path | None,
    calibrate_path: Path | None,
    **options: Any,
) -> None:
    """Plan the tables of REGISTRY's model for a cluster, without one.

    Shows the shards, memory of a rank, predicted times, and what the plugins change against plain
    TorchRec.

    \b
    recd plan registry.yaml --topology dgx-a100-80g --nodes 4 --batch-size auto
    recd plan registry.yaml --tiers --topology zionex-a100-40g --plot tiers.png
    recd plan registry.yaml --cache --memory 256MB --plot cache.png
    recd plan registry.yaml --readers --stall-target 0.02
    """
    from recd_plugins import load_registry
    from recd_plugins.planning.report_plot import plot
    from recd_plugins.planning.report_text import render
    from recd_plugins.planning.study import study
    from recd_plugins.planning.topologies import MACHINE
    from recd_plugins.training import upstream_noise

    if calibrate_path is not None and not tiers and (topology != MACHINE or (nodes or 1) > 1):
        raise click.UsageError(
            "--calibrate measures this machine: leave out --topology and --nodes"
        )
    what_if = {
        name: value
        for name, value in (("memory_ratio", budget), ("overlap", overlap))
        if value is not None
    }
    if what_if and not tiers:
        raise click.UsageError("--budget and --overlap are for --tiers")
    if tiers and batch_size == "auto":
        raise click.UsageError("--tiers are chosen for a number of rows: --batch-size N")
    if tiers and cache:
        raise click.UsageError("--tiers and --cache are two plans: make one after the other")
    others = {
        "--tiers": tiers,
        "--cache": cache,
        "--topology": topology != MACHINE,
        "--nodes": nodes,
        "--ranks-per-node": ranks_per_node,
        "--batch-size auto": batch_size == "auto",
        "--calibrate": calibrate_path,
    }
    check_reader_options(readers, stall_target, others)
    of_cache = {name: options[name] for name in CACHE_OPTIONS}
    check_cache_options(cache, of_cache, batch_size == "auto")
    check_reports(json_path, plot_path)
    upstream_noise.silence()
    loaded = load_registry(registry, plugins_dir=plugins_dir)
    rows = loaded.training.batch_size if batch_size is None else batch_size
    if readers:
        plan_readers(
            loaded,
            plugins_dir,
            int(rows),
            stall_target,
            json_path=json_path,
            plot_path=plot_path,
        )
        return
    if calibrate_path is not None and not tiers:
        nodes = 1  # whatever nodes its ranks stand for
    spec = chosen_topology(loaded, topology, nodes, ranks_per_node)
    if tiers:
        plan_tiers(
            loaded.with_training({"batch_size": rows}),
            plugins_dir,
            topology,
            spec,
            what_if=what_if,
            json_path=json_path,
            plot_path=plot_path,
            calibrate_path=calibrate_path,
        )
        return
    if cache:
        plan_cache(
            loaded,
            plugins_dir,
            topology,
            spec,
            None if rows == "auto" else int(rows),
            of_cache,
            json_path=json_path,
            plot_path=plot_path,
            calibrate_path=calibrate_path,
        )
        return
    progress, console = Console(stderr=True), Console()
    if calibrate_path is not None:
        from recd_plugins.planning.calibration_file import calibrate_machine

        with progress.status("training a few steps to see what they cost"):
            spec, calibration = calibrate_machine(loaded, plugins_dir, spec, calibrate_path)
        console.print(calibration.table())
    with progress.status("reading the first rows") as status:
        made = study(loaded, topology, spec, status.update)
        report = made.report(loaded, None if rows == "auto" else int(rows))
    console.print(render(report))
    if json_path is not None:
        write_json(json_path, report.as_json())
    if plot_path is not None:
        plot(report, plot_path)
