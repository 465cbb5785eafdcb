"""The report of ``recd plan`` as a picture."""

from __future__ import annotations

from pathlib import Path

from recd_plugins.files import write_figure
from recd_plugins.planning.plan_report import PlanReport
from recd_plugins.plots import plot_style
from recd_plugins.values.stages import STAGES


@plot_style()
def plot(report: PlanReport, path: Path) -> None:
    """Memory of the fullest rank by component, and time of a step by stage, of both sides.

    Args:
        report: what to show.
        path: a file whose suffix says its format, as ``.png`` or ``.svg``.

    Raises:
        RecdError: the file cannot be written, or matplotlib knows no such format.
    """
    from matplotlib.figure import Figure

    sides = {"plugins": report.plugins}
    if report.plain is not None:
        sides["plain"] = report.plain
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    memory, time = figure.subplots(1, 2)
    for axes, parts in ((memory, report.components), (time, STAGES)):
        base = dict.fromkeys(sides, 0.0)
        for part in parts:
            heights = [
                side.held(part)[int(side.memory_by_rank.argmax())] / 2**30
                if axes is memory
                else getattr(side.seconds, part) * 1e3
                for side in sides.values()
            ]
            label = part.replace("_", "-")
            axes.bar(list(sides), heights, bottom=list(base.values()), label=label, width=0.5)
            base = {name: base[name] + h for name, h in zip(base, heights, strict=True)}
    memory.axhline(report.spec.memory_bytes / 2**30, color="black", linestyle="--", linewidth=1)
    memory.set(title="Memory of the fullest rank", ylabel="GiB")
    time.set(title=f"{report.time_of_step.capitalize()} of a step", ylabel="ms")
    for axes in (memory, time):
        axes.legend(fontsize="small")
    batches = ", ".join(f"{name} {side.batch_size:,} rows" for name, side in sides.items())
    figure.suptitle(f"{report.spec.world_size:,} ranks of {report.topology} ({batches})")
    write_figure(path, figure)
