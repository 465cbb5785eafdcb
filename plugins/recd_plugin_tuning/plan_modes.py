"""Implements ``recd plan --auto`` and ``--scaling``, and the measurements of ``--calibrate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from recd_plugins.api import PlanAnswer, PlanMode, PlanQuestion, load_registry, plan_modes

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from recd_plugins import RunConfig
    from recd_plugins.api import topologies


_GLOBAL_BATCH = 65_536


class AutoPlan(plan_modes.TablesPlan):
    """Plan that uses ``auto`` instead of the first sharding entry.

    ``--calibrate`` trains with the registry's own sharding.
    """

    flag = "--auto"
    help = "Choose the sharding as use: auto does, in place of the first sharding entry."

    def plan(self, question: PlanQuestion) -> PlanAnswer:
        """Plan with ``auto``."""
        path = question.registry.path
        registry = load_registry(path, plugins_dir=question.plugins_dir, sharding="auto")
        return super().plan(replace(question, registry=registry))


class ScalingPlan(PlanMode):
    """Predicted step times for 1 node up to all nodes of a topology."""

    flag = "--scaling"
    help = (
        "Plan for 1, 2, 4 ... up to --nodes nodes instead: predicted step times with a fixed batch "
        "per rank (weak) or in all (strong)."
    )
    because = "plans for several numbers of ranks and batch sizes"

    def options(self) -> Sequence[click.Option]:
        """Return ``--beside`` and ``--global-batch``."""
        return [
            click.Option(
                ["--beside"],
                type=click.Path(path_type=Path),
                multiple=True,
                metavar="REGISTRY",
                help="another registry file with the same data and model. Can be repeated.",
            ),
            click.Option(
                ["--global-batch"],
                type=click.IntRange(min=1),
                default=_GLOBAL_BATCH,
                show_default=True,
                help="global batch size in rows, for strong scaling.",
            ),
        ]

    def plan(self, question: PlanQuestion) -> PlanAnswer:
        """Plan each registry for each number of nodes."""
        if question.options["global_batch"] < (ranks := question.spec.world_size):
            raise click.UsageError(
                f"--global-batch {question.options['global_batch']}: no row for each of {ranks:,} "
                "ranks"
            )
        from recd_plugin_tuning.scaling import STOCK, plot, render, study_scaling

        first = question.registry.with_training({"batch_size": question.batch_size})
        registries: dict[str, RunConfig] = {}
        for path in (first.path, *question.options["beside"]):
            if path.stem in {STOCK, *registries}:
                raise click.UsageError(
                    f"{path}: there is a line named {path.stem}; rename the file"
                )
            loaded = load_registry(path, plugins_dir=question.plugins_dir) if registries else first
            registries[path.stem] = loaded
        report = study_scaling(
            registries,
            question.topology,
            question.spec,
            question.options["global_batch"],
            question.say,
        )
        return PlanAnswer(render(report), report.as_json, partial(plot, report))


class Calibrated(plan_modes.Measurement):
    """Measures the cluster (``recd calibrate --quick``) or training steps of the model."""

    def cluster(self, device: torch.device) -> topologies.TopologySpec:
        """Measure for 10 to 20 seconds."""
        import torch.distributed as dist

        from recd_plugin_tuning.cluster import far_apart, measure_cluster
        from recd_plugin_tuning.rank_work import QUICK

        found = measure_cluster(device, QUICK, lambda _: None)
        if dist.get_rank() == 0 and (apart := far_apart(found)):
            click.echo(
                f"{apart}: plans are made for these too; recd calibrate measures longer", err=True
            )
        return found.spec

    def steps(
        self, question: PlanQuestion, path: Path
    ) -> tuple[topologies.TopologySpec, RenderableType]:
        """Measure training steps on the ranks of ``question.spec``."""
        from recd_plugin_tuning.steps import calibrate
        from recd_plugins.api import sessions

        registry, job = sessions.calibration_job(
            question.registry, question.plugins_dir, question.spec, path, question.batch_size
        )
        found = calibrate(registry, job, question.spec)
        measured = question.spec.model_copy(update={"costs": found.costs})
        comment = f"Measured by recd plan {registry.path} --calibrate {path}."
        sessions.write_topology(path, measured, comment)
        return measured, found.table()
