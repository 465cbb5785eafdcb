"""``recd plan --tiers``: which rows live where, for any cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from recd_plugins.files import write_json

if TYPE_CHECKING:
    from recd_plugins.planning.topologies import TopologySpec
    from recd_plugins.registry import Registry


def plan_tiers(
    registry: Registry,
    _plugins_dir: Path | None,
    topology: str,
    spec: TopologySpec,
    *,
    what_if: dict[str, float],
    json_path: Path | None,
    plot_path: Path | None,
    calibrate_path: Path | None,
) -> None:
    """Measure this machine where asked to, then plan, print and write."""
    from recd_plugin_flexshard.planning.report_plot import plot
    from recd_plugin_flexshard.planning.report_text import render
    from recd_plugin_flexshard.planning.tier_study import study_tiers

    progress, console = Console(stderr=True), Console()
    if calibrate_path is not None:
        from recd_plugin_flexshard.planning.calibration_file import calibrate_tiers

        with progress.status("measuring collectives, and memory of a few training steps"):
            spec, calibration = calibrate_tiers(registry, spec, calibrate_path)
        console.print(calibration.table())
    with progress.status("reading the data") as status:
        report = study_tiers(
            registry,
            topology,
            spec,
            what_if=what_if,
            say=status.update,
        )
    console.print(render(report))
    if json_path is not None:
        write_json(json_path, report.as_json())
    if plot_path is not None:
        plot(report, plot_path)
