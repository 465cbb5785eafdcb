"""How runs, and ``recd plan --calibrate``, measure machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from recd_plugins.api import Measurement, PlanQuestion

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from recd_plugins.api import TopologySpec


class Calibrated(Measurement):
    """Links, collectives and works as ``recd calibrate --quick``; steps of the registry's model."""

    def cluster(self, device: torch.device) -> TopologySpec:
        """10 to 20 seconds of all ranks, where nothing else runs."""
        import torch.distributed as dist

        from recd_plugin_tuning.cluster.measure import measure_cluster
        from recd_plugin_tuning.cluster.report import far_apart
        from recd_plugin_tuning.cluster.timing import QUICK

        found = measure_cluster(device, QUICK, lambda _: None)
        if dist.get_rank() == 0 and (apart := far_apart(found)):
            click.echo(
                f"{apart}: plans are made for these too; recd calibrate measures longer", err=True
            )
        return found.spec

    def steps(self, question: PlanQuestion, path: Path) -> tuple[TopologySpec, RenderableType]:
        """Training steps on as many ranks as ``question.spec`` has."""
        from recd_plugin_tuning.steps import calibrate
        from recd_plugins.api import calibration_job, write_topology

        registry, job = calibration_job(
            question.registry, question.plugins_dir, question.spec, path, question.batch_size
        )
        found = calibrate(registry, job, question.spec)
        measured = question.spec.model_copy(update={"costs": found.costs})
        comment = f"Measured by recd plan {registry.path} --calibrate {path}."
        write_topology(path, measured, comment)
        return measured, found.table()
