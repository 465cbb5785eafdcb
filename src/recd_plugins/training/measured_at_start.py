"""The topology of a run on several nodes that names none: measured at its start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from recd_plugins.activity import doing
from recd_plugins.distributed.device import device_of_rank
from recd_plugins.errors import SetupError
from recd_plugins.planning.machines import machine_of
from recd_plugins.planning.measurement import measurement
from recd_plugins.planning.topologies import (
    TopologySpec,
    read_topology,
    this_machine,
    topology_of,
)
from recd_plugins.plugin_modules import qualified
from recd_plugins.registry import TrainingSpec
from recd_plugins.training.calibration_file import write_topology

#: Beside checkpoints: what the run was planned for, which it is again when it is resumed.
KEPT = "topology.yaml"
# Of its memory, what equal hosts have at least: kernels differ in what they keep for themselves.
_ALIKE = 0.99


def topology_at_start(
    training: TrainingSpec,
    device: str,
    ranks_per_node: int,
    *,
    resume: bool,
    plugins_dir: Path | None = None,
) -> TopologySpec | None:
    """What a run on several nodes measures first, the same on every rank. Collective.

    A run that goes on takes what stands beside its checkpoints, so that its plan stays what it was,
    unless it is on another number of nodes now, or on nodes with less memory.

    Args:
        training: None is measured where it names a topology.
        device: ``cpu`` or ``cuda``.
        ranks_per_node: under torchrun.
        resume: whether it goes on.
        plugins_dir: files that may measure, besides what is installed.

    Returns:
        None where nothing is to be measured: on one node, where a topology is named, and where
        nothing that is there measures, which rank 0 says.

    Raises:
        SetupError: nodes have different numbers of ranks or other packages, or a rank has ended.
    """
    nodes = dist.get_world_size() // ranks_per_node
    if training.topology is not None or nodes == 1:
        return None
    folder = training.checkpoint.path
    path = None if folder is None else Path(folder) / KEPT
    first = dist.get_rank() == 0
    least = _least_memory(this_machine(ranks_per_node, nodes=nodes, device=device_of_rank(device)))
    told: list[Any] = [None]
    if first and resume and path is not None and path.exists():
        kept = read_topology(path)
        if (kept.nodes, kept.ranks_per_node, kept.device) == (nodes, ranks_per_node, device):
            if all(now >= _ALIKE * then for now, then in zip(least, _memory(kept), strict=True)):
                click.echo(f"planned for the nodes as {path} has them, as before", err=True)
                told = [kept.model_dump()]
            else:
                click.echo(f"{path} is of nodes with more memory: planned anew", err=True)
    dist.broadcast_object_list(told)
    if told[0] is None:
        measured_by, start = measurement(plugins_dir), time.monotonic()
        _check_equal(None if measured_by is None else qualified(type(measured_by)))
        if measured_by is None:
            if first:
                click.echo(_assumed(machine_of(training, device=torch.device(device))), err=True)
            return None
        if first:
            click.echo(
                f"measuring {nodes} nodes first; where other programs run it takes longer", err=True
            )
        with doing("measuring the cluster"):
            spec = measured_by.cluster(device_of_rank(device))
        if first:
            click.echo(_line(spec, time.monotonic() - start), err=True)
            if path is not None:
                write_topology(path, spec, "Measured at the start of the run.")
        told = [spec.model_dump()]
        dist.broadcast_object_list(told)
    return topology_of(told[0])


def _memory(spec: TopologySpec) -> tuple[int, int]:
    return spec.ddr_bytes, spec.hbm_bytes or 0


def _least_memory(here: TopologySpec) -> tuple[int, int]:
    """Of any rank, its host's and its GPU's. Collective."""
    of_ranks: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(of_ranks, _memory(here))
    return min(host for host, _ in of_ranks), min(gpu for _, gpu in of_ranks)


def _check_equal(measured_by: str | None) -> None:
    """Refuse ranks that measure by different things, who would wait for one another."""
    ranks: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, measured_by)
    for rank, other in enumerate(ranks):
        if other != ranks[0]:
            raise SetupError(
                f"rank 0 measures the nodes by {ranks[0] or 'nothing'}, rank {rank} by "
                f"{other or 'nothing'}: install the same packages on every node"
            )


def _assumed(spec: TopologySpec) -> str:
    return (
        f"nothing that is installed measures the {spec.nodes} nodes: tables are planned as if a "
        f"rank had {spec.inter_node_bandwidth / 1e6:,.1f} MB/s between them. training.topology "
        "names a file that says what they have"
    )


def _line(spec: TopologySpec, seconds: float) -> str:
    rates = spec.collective_rates
    return (
        f"measured {spec.nodes} nodes in {seconds:.0f} s: {spec.inter_node_bandwidth / 1e6:,.1f} "
        f"MB/s of a rank between them, {rates.a2a_global.seconds * 1e3:.2f} ms for the least "
        "all-to-all. training.topology names a file of recd calibrate instead, or machine, which "
        "measures nothing"
    )
