"""``recd calibrate``: measures the cluster and writes a topology file."""

from __future__ import annotations

import time
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from recd_plugins.api import (
    RecdError,
    SetupError,
    cli_options,
    consoles,
    file_utils,
    imports,
    machine,
)

if TYPE_CHECKING:
    from recd_plugin_tuning.cluster import MeasuredCluster

# More ranks on one machine add no information.
_MOST_RANKS = 8
# Timeout of the start, and of hangs that the watchdog cannot end.
_TIMEOUT = timedelta(minutes=5)
# Seconds without a new round until rank 0 reports which ranks are stuck and all ranks exit.
_NOTICE, _HANG = 20.0, 60.0


@click.command()
@click.option(
    "-o", "--output", type=cli_options.OUTPUT, required=True, help="Topology file to write (YAML)."
)
@click.option(
    "--ranks",
    type=cli_options.AT_LEAST_1,
    help="Number of processes to start, as in training. Default: one per GPU or core, at most "
    f"{_MOST_RANKS}.",
)
@click.option(
    "--ranks-per-node",
    type=cli_options.AT_LEAST_1,
    help="Ranks per node, to simulate several nodes.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device of the tables; auto uses CUDA if every rank has a GPU.",
)
@click.option(
    "--quick", is_flag=True, help="Measure for 10 to 20 seconds instead of one or two minutes."
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@click.option(
    "--json", "json_path", type=cli_options.OUTPUT, help="Write all measurements to this file."
)
def calibrate(
    output: Path,
    ranks: int | None,
    ranks_per_node: int | None,
    device: str,
    quick: bool,
    force: bool,
    json_path: Path | None,
) -> None:
    """Measure this cluster and write the result as a topology file.

    Measures collectives by size, within and between nodes, and the local work of a rank: copies,
    lookups and matrix products. Pass the file to `training.topology` or `recd plan --topology`.
    The command starts ranks on this machine, or joins those of torchrun.

    \b
    recd calibrate -o cluster.yaml --ranks 2
    torchrun --nnodes 4 ... --no-python recd calibrate -o cluster.yaml
    """
    from recd_plugins.api import launcher, topologies, watch

    def check_files() -> None:
        if not topologies.is_file_name(output.name):
            raise RecdError(
                f"{output}: the name of a topology file must end in .yaml. Use another file name."
            )
        cli_options.check_output(output, force, begins=rb"(?ms).*^device *:")

    limits = watch.HangLimits(_NOTICE, _HANG, lambda: "Nothing was written.")
    rank = launcher.torchrun_rank()
    if rank is not None and (ranks or ranks_per_node):
        raise click.UsageError(
            "torchrun sets the number of ranks. Remove --ranks and --ranks-per-node."
        )
    imports.silence_upstream()
    if rank is None:
        check_files()
        ranks = ranks or _default_ranks(device)
        ranks_per_node = ranks_per_node or ranks
        if ranks % ranks_per_node:
            raise click.UsageError(
                f"--ranks {ranks} cannot be divided into nodes of {ranks_per_node} ranks. Use a "
                f"multiple of {ranks_per_node}."
            )
        found = launcher.launch(
            _measure,
            ranks,
            kind := _kind(device, ranks),
            quick,
            backend=launcher.backend_for(kind),
            timeout=_TIMEOUT,
            local_world_size=ranks_per_node,
            hang_limits=limits,
        )[0]
    else:
        kind = _kind(device, launcher.torchrun_ranks_per_node())
        if rank == 0:
            check_files()
        with (
            launcher.join_torchrun(launcher.backend_for(kind), _TIMEOUT) as (rank, world_size),
            watch.watched_by_each_other(rank, world_size, limits),
        ):
            found = _measure(rank, world_size, kind, quick)
        if rank:
            return
    _tell(found, _comment(found, quick), output, json_path)


def _default_ranks(device: str) -> int:
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    return min(gpus or machine.available_cores(), _MOST_RANKS)


def _kind(device: str, ranks: int) -> str:
    """Return the device type, ``cpu`` or ``cuda``, for option ``--device``."""
    from recd_plugins.api import devices

    lack = "" if device == "cpu" else devices.lack_for_cuda(ranks)
    if lack and device == "cuda":
        raise SetupError(f"--device cuda: {lack}. Use --device cpu to measure without CUDA.")
    return "cpu" if device == "cpu" or lack else "cuda"


def _measure(rank: int, world_size: int, kind: str, quick: bool) -> MeasuredCluster:  # noqa: ARG001
    from recd_plugin_tuning.cluster import measure_cluster
    from recd_plugin_tuning.rank_work import FULL, QUICK
    from recd_plugins.api import devices, doing

    imports.silence_upstream()
    start = time.monotonic()

    def say(what: str) -> None:
        if rank == 0:
            click.echo(f"{time.monotonic() - start:4.0f} s  measuring {what}", err=True)

    with doing("measuring"):
        return measure_cluster(devices.device_of_rank(kind), QUICK if quick else FULL, say)


def _comment(found: MeasuredCluster, quick: bool) -> str:
    """Return the comment in the first line of the topology file."""
    how = f"recd calibrate {version('recd-plugins-core')}{' --quick' if quick else ''}"
    line = f"Measured by {how} on {time.strftime('%Y-%m-%d')}."
    return (
        line if found.spec.nodes > 1 else f"{line} With one node, rates between nodes are assumed."
    )


def _tell(
    found: MeasuredCluster,
    comment: str,
    output: Path,
    json_path: Path | None,
) -> None:
    from recd_plugin_tuning.cluster import render
    from recd_plugins.api import sessions

    spec = found.spec
    sessions.write_topology(output, spec, comment)
    if json_path is not None:
        file_utils.write_json(json_path, found.as_json())
    consoles.output_console().print(render(found))
    click.echo(f"{output}: {spec.nodes} x {spec.ranks_per_node} ranks on {spec.device}", err=True)
