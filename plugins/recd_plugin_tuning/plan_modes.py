"""Modes ``--auto`` and ``--scaling`` of ``recd plan``, and cluster measurement before a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from recd_plugins.api import cli_options, load_registry, plan_modes

if TYPE_CHECKING:
    import torch

    from recd_plugins import RunConfig
    from recd_plugins.api import topologies


_GLOBAL_BATCH = 65_536


class AutoPlan(plan_modes.TablesPlan):
    """Mode ``--auto`` of ``recd plan``: replaces the first ``sharding`` entry by ``auto``."""

    flag = "--auto"
    help = "Choose the sharding with use: auto instead of the first sharding entry."

    def plan(self, question: plan_modes.PlanQuestion) -> plan_modes.PlanAnswer:
        """Plan with sharding ``auto``."""
        path = question.registry.path
        registry = load_registry(path, plugins_dir=question.plugins_dir, sharding="auto")
        return super().plan(replace(question, registry=registry))


class ScalingPlan(plan_modes.PlanMode):
    """Mode ``--scaling`` of ``recd plan``: predicts the step time for each number of nodes."""

    flag = "--scaling"
    help = (
        "Predict step times on 1, 2, 4 ... up to --nodes nodes, for weak scaling (fixed batch size "
        "per rank) and strong scaling (fixed global batch size)."
    )
    because = "plans for several numbers of ranks and batch sizes"

    def options(self) -> Sequence[click.Option]:
        """Return ``--beside``, ``--global-batch`` and ``--plot``."""
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
            click.Option(
                ["--plot", "plot_path"],
                type=cli_options.OUTPUT,
                help="plot the step times to this file (.png, .svg, .pdf).",
            ),
        ]

    def plan(self, question: plan_modes.PlanQuestion) -> plan_modes.PlanAnswer:
        """Plan each registry file for each number of nodes."""
        if question.options["global_batch"] < (ranks := question.spec.world_size):
            raise click.UsageError(
                f"--global-batch {question.options['global_batch']} is too small for {ranks:,} "
                f"ranks. Use at least {ranks:,} rows."
            )
        from recd_plugin_tuning.scaling import STOCK, plot, render, study_scaling

        first = question.registry.with_training({"batch_size": question.batch_size})
        registries: dict[str, RunConfig] = {}
        for path in (first.path, *question.options["beside"]):
            if path.stem in {STOCK, *registries}:
                raise click.UsageError(
                    f"{path}: another registry or baseline is already named {path.stem!r} in the "
                    "plot. Rename the file."
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
        if (path := question.options["plot_path"]) is not None:
            plot(report, path)
        return plan_modes.PlanAnswer(render(report), report.as_json)


class Calibrated(plan_modes.Measurement):
    """Measures the cluster as ``recd calibrate --quick`` does."""

    def cluster(self, device: torch.device) -> topologies.TopologySpec:
        """Measure the cluster for 10 to 20 seconds, and return its topology."""
        from recd_plugin_tuning.cluster import measure_cluster
        from recd_plugin_tuning.rank_work import QUICK

        return measure_cluster(device, QUICK, lambda _: None).spec
