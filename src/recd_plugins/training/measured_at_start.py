"""Files of measured topologies, and the one that a run on several nodes measures at its start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import torch
import torch.distributed as dist
from ruamel.yaml import YAML

from recd_plugins.config import TrainingSpec
from recd_plugins.config.device import device_of_rank
from recd_plugins.planning.plan_mode import measurement
from recd_plugins.planning.topologies import (
    TopologySpec,
    is_file_name,
    machine_of,
    read_topology,
    this_machine,
    topology_of,
)
from recd_plugins.runtime.activity import doing
from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.files import write_text
from recd_plugins.runtime.plugin_modules import qualified
from recd_plugins.runtime.rank_agreement import check_agreement

if TYPE_CHECKING:
    import torch

    from recd_plugins.training.assembly import Assembled


#: Beside checkpoints: the topology that the run was planned for.
KEPT = "topology.yaml"
# Equal hosts have at least this share of each other's memory: kernels differ in what they keep.
_ALIKE = 0.99


def topology_at_start(
    training: TrainingSpec,
    device: str,
    ranks_per_node: int,
    *,
    resume: bool,
    plugins_dir: Path | None = None,
) -> TopologySpec | None:
    """Measure the topology of a run on several nodes, the same on every rank. Collective.

    A resumed run takes the one beside its checkpoints, so that its plan stays, unless the number of
    nodes changed or they have less memory.

    Args:
        training: nothing is measured if it names a topology.
        device: ``cpu`` or ``cuda``.
        ranks_per_node: under torchrun.
        resume: whether the run goes on.
        plugins_dir: files that may measure, besides what is installed.

    Returns:
        None on one node, with a named topology, and if nothing that is installed measures.
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
        by = None if measured_by is None else qualified(type(measured_by))
        check_agreement("measuring the nodes", {"what measures them": by})
        if measured_by is None:
            if first:
                spec = machine_of(training, device=torch.device(device))
                click.echo(
                    f"nothing that is installed measures the {spec.nodes} nodes: tables are "
                    f"planned as if a rank had {spec.inter_node_bandwidth / 1e6:,.1f} MB/s between "
                    "them. training.topology names a file that says what they have",
                    err=True,
                )
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
    """Return the least memory of any rank's host and GPU. Collective."""
    of_ranks: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(of_ranks, _memory(here))
    return min(host for host, _ in of_ranks), min(gpu for _, gpu in of_ranks)


def _line(spec: TopologySpec, seconds: float) -> str:
    rates = spec.collective_rates
    return (
        f"measured {spec.nodes} nodes in {seconds:.0f} s: {spec.inter_node_bandwidth / 1e6:,.1f} "
        f"MB/s of a rank between them, {rates.a2a_global.seconds * 1e3:.2f} ms for the least "
        "all-to-all. training.topology names a file of recd calibrate instead, or machine, which "
        "measures nothing"
    )


def refuse_other_names(path: Path) -> None:
    """Refuse a file name that names no topology, before anything is measured for it."""
    if not is_file_name(path.name):
        raise RecdError(f"{path}: the file of a topology ends in .yaml; name another")


def refuse_existing(path: Path) -> None:
    """Refuse to overwrite a topology, and other names."""
    refuse_other_names(path)
    if path.exists():
        raise RecdError(f"{path} exists already; remove it, or name another file")


def write_topology(path: Path, spec: TopologySpec, comment: str) -> None:
    """Write a topology for ``read_topology``, whole or not at all."""
    text = StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    values = spec.model_dump(exclude_none=True)
    # A required field is last: a file that was cut is refused.
    values["device"] = values.pop("device")
    yaml.dump(values, text)
    write_text(path, f"# {comment}\n{text.getvalue()}")


T = TypeVar("T")

# A pipeline trains on a batch while it sends the next two.
_READ_AHEAD = 2


def steps_in_turns(
    parts: Assembled,
    rank: int,
    world_size: int,
    device: torch.device,
    sizes: Sequence[int],
    *,
    rounds: int,
    lead: int,
    measured: int,
) -> Iterator[tuple[int, Callable[[], object]]]:
    """Yield each step to measure with its batch size; call it before asking for the next.

    Args:
        parts: a model that is ready to train.
        rank: of this process.
        world_size: ranks.
        device: of the model.
        sizes: rows of a rank; they take turns, ``rounds`` times.
        rounds: turns of each size.
        lead: steps of a turn before those to measure.
        measured: steps of a turn to measure.
    """
    pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, device)
    with ExitStack() as stack:
        loaders = {
            size: stack.enter_context(
                parts.prepared.with_training({"batch_size": size}).dataloader(
                    rank=rank, world_size=world_size, device=device
                )
            )
            for size in sizes
        }
        turns = list(sizes) * rounds
        batches = _in_turns(loaders, turns, each=lead + measured + _READ_AHEAD)
        for size in turns:
            for _ in range(lead):
                pipeline.progress(batches)
            for _ in range(measured):
                yield size, lambda: pipeline.progress(batches)
            for _ in range(_READ_AHEAD):
                pipeline.progress(batches)


def _in_turns(
    loaders: Mapping[int, Iterable[T]], turns: Sequence[int], *, each: int
) -> Iterator[T]:
    """Yield ``each`` batches of one size after the other, and more of the last to read ahead."""
    batches = {size: _endless(loader) for size, loader in loaders.items()}
    for size in turns:
        yield from islice(batches[size], each)
    yield from islice(batches[turns[-1]], _READ_AHEAD)


def _endless(loader: Iterable[T]) -> Iterator[T]:
    while True:
        yield from loader
