"""``recd plan``: the sharding plan of a registry's model for any cluster, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from recd_plugins.cli.plan_tiers import plan_tiers
from recd_plugins.files import write_json

_PICTURES = (".png", ".svg", ".pdf")


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
@click.option(
    "--topology",
    default="machine",
    show_default=True,
    metavar="NAME|FILE",
    help="zionex-a100-40g, dgx-a100-80g, p4d.24xlarge, ndv4, dgx-h100, machine (this one), or a "
    "YAML file.",
)
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes; the topology's own without it.")
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    help="Ranks of a node; the topology's own without it; on this machine as training.ranks and "
    "training.ranks_per_node say.",
)
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
    type=click.FloatRange(min=0, min_open=True),
    metavar="RATIO",
    help="With --tiers: memory of a rank over that of row-wise, in place of the entries' own.",
)
@click.option(
    "--overlap",
    type=click.FloatRange(min=0, max=1),
    metavar="SHARE",
    help="With --tiers: how much of the other collectives' time work hides, 0 to 1, likewise.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write the whole report here.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write a picture of memory and times here (.png, .svg, .pdf).",
)
@click.option(
    "--calibrate",
    "calibrate_path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="First train a few steps here, and write this machine, with what they cost, as a topology "
    "to this YAML file; --topology takes it. With --tiers: collectives, and memory of copied rows.",
)
@click.pass_obj
def plan(
    plugins_dir: Path | None,
    registry: Path,
    topology: str,
    nodes: int | None,
    ranks_per_node: int | None,
    batch_size: int | str | None,
    tiers: bool,
    budget: float | None,
    overlap: float | None,
    json_path: Path | None,
    plot_path: Path | None,
    calibrate_path: Path | None,
) -> None:
    """Plan the tables of REGISTRY's model for a cluster, without one.

    Shows the shards, memory of a rank, predicted times, and what the plugins change against plain
    TorchRec.

    \b
    recd plan registry.yaml --topology dgx-a100-80g --nodes 4 --batch-size auto
    recd plan registry.yaml --tiers --topology zionex-a100-40g --plot tiers.png
    """
    from recd_plugins import load_registry
    from recd_plugins.planning.report_plot import plot
    from recd_plugins.planning.report_text import render
    from recd_plugins.planning.study import study
    from recd_plugins.planning.topologies import MACHINE, load_topology
    from recd_plugins.training import upstream_noise
    from recd_plugins.training.device import choose_device

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
    if plot_path is not None and plot_path.suffix not in _PICTURES:
        raise click.UsageError(f"--plot {plot_path} ends in none of {', '.join(_PICTURES)}")
    upstream_noise.silence()
    loaded = load_registry(registry, plugins_dir=plugins_dir)
    device = choose_device(loaded) if topology == MACHINE else "cpu"
    here = (topology, nodes, ranks_per_node) == (MACHINE, None, None)
    if here and (tiers or calibrate_path is None):
        nodes, ranks_per_node = loaded.training.nodes, loaded.training.ranks_per_node
    spec = load_topology(
        topology,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        ranks=loaded.training.ranks,
        device=device,
    )
    rows = loaded.training.batch_size if batch_size is None else batch_size
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
