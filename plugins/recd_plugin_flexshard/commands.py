"""The commands ``recd plan --tiers`` and ``recd simulate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from recd_plugins.api import RecdError, cli_options, consoles, file_utils, plan_modes

if TYPE_CHECKING:
    from recd_plugin_flexshard.planning import TierPlan
    from recd_plugins.api import RunConfig, study, topologies


@dataclass(frozen=True)
class PlannedTiers:
    """A prepared model, and a TierPlan (rows to copy) per sharding entry, keyed ``sharding[N]``."""

    candidate: study.ShardableModel
    plans: Mapping[str, TierPlan]


def planned_tiers(registry: RunConfig, spec: topologies.TopologySpec) -> PlannedTiers:
    """Load data and model, and choose the rows to copy for each flexshard sharding entry.

    Raises:
        RecdError: no sharding entry uses a flexshard plugin.
    """
    from recd_plugin_flexshard.strategy import TieredStrategy
    from recd_plugins.api import prepared_data, study

    prepared_data.wrapped_dataset(registry).prepare()
    candidate = study.with_plugins(registry, spec)
    parts = candidate.prepared.parts.items()
    plans = {field: part.plan for field, part in parts if isinstance(part, TieredStrategy)}
    if plans:
        return PlannedTiers(candidate, plans)
    raise RecdError(
        f"{registry.path}: the sharding: section has no flexshard entry. Add an entry that uses "
        "'flexshard.two_tier', 'flexshard.three_tier' or 'flexshard.joint' for the tables of "
        "features in the pooling: section."
    )


class TiersPlan(plan_modes.PlanMode):
    """Implements ``recd plan --tiers``, which shows the rows that flexshard plugins would copy."""

    flag = "--tiers"
    help = (
        "Show the tiers of each flexshard entry, and for comparison those of the other flexshard "
        "plugins."
    )
    because = "plans for a fixed batch size"

    def plan(self, question: plan_modes.PlanQuestion) -> plan_modes.PlanAnswer:
        from recd_plugin_flexshard.plan_report import TiersReport, render, study_entry
        from recd_plugins.api import at_entry

        question.say("reading the data")
        registry = question.registry.with_training({"batch_size": question.batch_size})
        planned = planned_tiers(registry, question.spec).plans
        entries = []
        for entry in registry.sharding:
            if (plan := planned.get(entry.field)) is not None:
                question.say(f"choosing the rows to copy for {entry.field}")
                with at_entry(registry.path, entry):
                    entries.append(study_entry(entry.field, entry.plugin.name, plan))
        report = TiersReport(
            question.topology, question.spec, registry.training.batch_size, entries
        )
        return plan_modes.PlanAnswer(render(report), report.as_json)


@click.command()
@click.argument("registry", type=click.Path(path_type=Path))
@cli_options.topology_options
@click.option(
    "--batch-size",
    type=cli_options.AT_LEAST_1,
    help="Overrides training.batch_size.",
)
@click.option(
    "--steps",
    type=cli_options.AT_LEAST_1,
    default=3,
    show_default=True,
    help="Number of batches per rank.",
)
@click.option(
    "--data",
    is_flag=True,
    help="Use converted batches of the training data instead of random batches.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    help="Write the report as JSON to this file.",
)
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
    json_path: Path | None,
) -> None:
    """Simulate the communication of tables sharded by a flexshard plugin, without starting ranks.

    REGISTRY is a registry file with a flexshard entry. The report shows bytes sent per rank,
    estimated times and load balance, compared with TorchRec's row-wise sharding.

    \b
    recd simulate registry.yaml --topology zionex-a100-40g --nodes 16
    """
    from recd_plugin_flexshard.planning.simulate import DrawnBatches, RegistryBatches
    from recd_plugin_flexshard.planning.simulate import simulate as play
    from recd_plugin_flexshard.simulate_report import as_json, render
    from recd_plugins.api import imports, load_registry

    imports.silence_upstream()
    loaded = load_registry(registry, plugins_dir=plugins_dir)
    if batch_size is not None:
        loaded = loaded.with_training({"batch_size": batch_size})
    topology = topology or loaded.training.topology or "machine"
    spec = cli_options.chosen_topology(loaded, topology, nodes, ranks_per_node)
    with consoles.error_console().status("choosing the rows to copy"):
        planned = planned_tiers(loaded, spec)
    tables = {table.name: table for table in planned.candidate.tables}
    entries = {}
    for field, plan in planned.plans.items():
        source: DrawnBatches | RegistryBatches = DrawnBatches(plan)
        if data:
            read = [tables[table.name] for table in plan.tables]
            source = RegistryBatches(planned.candidate.prepared, read)
        with consoles.error_console().status(f"simulating {field}"):
            entries[field] = play(plan, source, steps)
    if json_path is not None:
        file_utils.write_json(json_path, as_json(topology, spec, entries))
    consoles.output_console().print(render(topology, spec, entries))
