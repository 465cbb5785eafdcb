"""``recd simulate``: batches played through a registry's tiers of rows, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from recd_plugins.api import RecdError
from recd_plugins.api.commands import (
    AT_LEAST_1,
    COUNT_FROM_0,
    chosen_topology,
    error_console,
    output_console,
    report_options,
    topology_options,
)
from recd_plugins.api.files import write_json

if TYPE_CHECKING:
    from recd_plugin_flexshard.planning import TierPlan
    from recd_plugin_flexshard.planning.simulate import BatchIds
    from recd_plugins.api.planning import Candidate

#: Time and memory grow with their square: so many took 3 minutes, with 3 tables on two cores.
_MOST_RANKS = 16_384


@click.command()
@click.argument("registry", type=click.Path(path_type=Path))
@topology_options
@click.option(
    "--batch-size",
    type=AT_LEAST_1,
    help="Rows of a rank, in place of training.batch_size.",
)
@click.option("--steps", type=AT_LEAST_1, default=3, show_default=True, help="Batches of a rank.")
@click.option(
    "--data",
    is_flag=True,
    help="Play the registry's own batches, as its converter gives them, in place of drawn ones.",
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    help="Draw batches from this access profile, in place of the one that was planned for.",
)
@click.option("--seed", type=COUNT_FROM_0, default=0, show_default=True, help="Of drawn batches.")
@report_options("Write the whole report here.", "Write a picture of balance and times here")
@click.pass_obj
def simulate(
    plugins_dir: Path | None,
    registry: Path,
    topology: str | None,
    nodes: int | None,
    ranks_per_node: int | None,
    batch_size: int | None,
    steps: int,
    data: bool,
    profile_path: Path | None,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Play batches through the tiers of rows of REGISTRY, on any number of ranks, without them.

    Shows what each rank sends, modelled times, memory and balance, next to plain row-wise tables.

    \b
    recd simulate registry.yaml --topology zionex-a100-40g --nodes 16
    """
    from recd_plugin_flexshard.planning.simulate import simulate as play
    from recd_plugin_flexshard.planning.simulate_report import SimulationReport, plot, render
    from recd_plugin_flexshard.planning.tier_study import planned_tiers
    from recd_plugins.api.commands import silence_upstream
    from recd_plugins.api.registry import load_registry

    if data and profile_path is not None:
        raise click.UsageError("--data plays real batches, --profile drawn ones: leave one out")
    silence_upstream()
    loaded = load_registry(registry, plugins_dir=plugins_dir)
    if batch_size is not None:
        loaded = loaded.with_training({"batch_size": batch_size})
    topology = topology or loaded.training.topology or "machine"
    spec = chosen_topology(loaded, topology, nodes, ranks_per_node)
    if spec.world_size > _MOST_RANKS:
        raise RecdError(
            f"{spec.world_size:,} ranks: no more than {_MOST_RANKS:,} can be played; recd plan "
            "plans for more"
        )
    progress, console = error_console(), output_console()
    with progress.status("planning tiers"):
        planned = planned_tiers(loaded, spec)
    entries = {}
    for field, plan in planned.plans.items():
        source = _source(planned.candidate, plan, data, profile_path, seed)
        with _bar(f"playing {field}", spec.world_size) as advance:
            entries[field] = play(plan, source, steps, advance)
    report = SimulationReport(topology, spec, entries)
    if json_path is not None:
        write_json(json_path, report.as_json())
    if plot_path is not None:
        plot(report, plot_path)
    console.print(render(report))


def _source(
    candidate: Candidate, plan: TierPlan, data: bool, profile_path: Path | None, seed: int
) -> BatchIds:
    from recd_plugin_flexshard.planning import TableDemand
    from recd_plugin_flexshard.planning.sources import DrawnBatches, RegistryBatches
    from recd_plugins.api.access import AccessProfile

    if data:
        tables = {table.name: table for table in candidate.tables}
        return RegistryBatches(candidate.prepared, [tables[table.name] for table in plan.tables])
    if profile_path is None:
        return DrawnBatches(plan, seed)
    profile = AccessProfile.load(profile_path)
    demands = []
    for planned in (table.demand for table in plan.tables):
        access = profile.covering(planned.name, planned.num_embeddings)
        factor = planned.dedupe_factor if access.batch_size is None else access.dedupe_factor
        demand = TableDemand.from_access(access, planned.embedding_dim, factor)
        # A profile may know other features.
        demands.append(replace(demand, features=planned.features))
    return DrawnBatches(plan, seed, demands, str(profile_path))


@contextmanager
def _bar(what: str, ranks: int) -> Iterator[Callable[[], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("ranks"),
    )
    with Progress(*columns, console=error_console(), transient=True) as progress:
        task = progress.add_task(what, total=ranks)
        yield lambda: progress.advance(task)
